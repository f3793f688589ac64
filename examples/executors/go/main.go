// An executor of protocol 1 with Go's standard library. Put your functions into handlers.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
	"unicode/utf8"
)

type request struct {
	Version  any             `json:"protocol_version"`
	JobID    any             `json:"job_id"`
	Function any             `json:"function_name"`
	Args     any             `json:"args"`
	Kwargs   any             `json:"kwargs"`
	Context  json.RawMessage `json:"context"`
}

type outcome struct {
	JobID      string   `json:"job_id"`
	Status     string   `json:"status"`
	Result     any      `json:"result"`
	Message    *string  `json:"error_message"`
	Type       *string  `json:"error_type"`
	RetryAfter *float64 `json:"retry_after_seconds"`
}

type call struct {
	args    []any
	kwargs  map[string]any
	context map[string]any
}

type retry struct{ seconds float64 }

func (retry) Error() string { return "later" }

func first(c call) any {
	if len(c.args) > 0 {
		return c.args[0]
	}
	return c.kwargs["value"]
}

func number(value any) float64 {
	found, _ := value.(json.Number).Float64()
	return found
}

var handlers = map[string]func(call) (any, error){
	"conformance.echo":    func(c call) (any, error) { return first(c), nil },
	"conformance.fail":    func(c call) (any, error) { return nil, errors.New(c.args[0].(string)) },
	"conformance.retry":   func(c call) (any, error) { return nil, retry{number(c.args[0])} },
	"conformance.context": func(c call) (any, error) { return c.context, nil },
	"conformance.sleep": func(c call) (any, error) {
		time.Sleep(time.Duration(number(c.args[0]) * float64(time.Second)))
		return nil, nil
	},
	"conformance.print": func(c call) (any, error) { fmt.Println(c.args[0]); return nil, nil },
	"conformance.child": func(c call) (any, error) {
		child := exec.Command("echo", c.args[0].(string))
		child.Stdout, child.Stderr = os.Stdout, os.Stderr
		return nil, child.Run()
	},
	"conformance.crash": func(call) (any, error) { os.Exit(9); return nil, nil },
}

func failed(jobID, kind, message string) outcome {
	return outcome{JobID: jobID, Status: "error", Type: &kind, Message: &message}
}

func execute(jobID string, asked request) (answer outcome) {
	if version, is := asked.Version.(string); is && version != "1" {
		return failed(jobID, "unsupported_version", "version 1 is spoken here")
	}
	name, isName := asked.Function.(string)
	args, isArgs := asked.Args.([]any)
	kwargs, isKwargs := asked.Kwargs.(map[string]any)
	var context map[string]any
	isContext := decode(asked.Context, &context) == nil && context != nil
	if asked.Version != "1" || !isName || !isArgs || !isKwargs || !isContext {
		return failed(jobID, "bad_request", "a field is missing or of another type")
	}
	handler, known := handlers[name]
	if !known {
		return failed(jobID, "handler_not_found", "there is no "+name)
	}
	defer func() {
		if panicked := recover(); panicked != nil {
			answer = failed(jobID, "panic", fmt.Sprint(panicked))
		}
	}()
	result, err := handler(call{args, kwargs, context})
	if later, is := err.(retry); is {
		return outcome{JobID: jobID, Status: "retry", RetryAfter: &later.seconds}
	}
	if err != nil {
		return failed(jobID, fmt.Sprintf("%T", err), err.Error())
	}
	return outcome{JobID: jobID, Status: "success", Result: result}
}

// Numbers stay as they were written; as floats, large ones would be rounded.
func decode(data []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	if err := decoder.Decode(into); err != nil {
		return err
	}
	if _, err := decoder.Token(); err != io.EOF {
		return errors.New("more than one value in a line")
	}
	return nil
}

func main() {
	// Descriptor 1 becomes stderr before any handler runs; only this file still has the real one, and no child.
	out, err := syscall.Dup(1)
	if err != nil || syscall.Dup3(2, 1, 0) != nil {
		os.Exit(2)
	}
	syscall.CloseOnExec(out)
	in := bufio.NewReaderSize(os.Stdin, 1<<16)
	outcomes := os.NewFile(uintptr(out), "outcomes")
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return // text without a line feed is not a complete line
		}
		var asked request
		if !utf8.Valid(line) || decode(line, &asked) != nil {
			fmt.Fprintln(os.Stderr, "no JSON: a line of", len(line), "bytes")
			continue
		}
		jobID, is := asked.JobID.(string)
		if !is {
			fmt.Fprintln(os.Stderr, "no request: a line of", len(line), "bytes")
			continue
		}
		var answer bytes.Buffer
		encoder := json.NewEncoder(&answer)
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(execute(jobID, asked)); err != nil {
			answer.Reset()
			_ = encoder.Encode(failed(jobID, "invalid_result", err.Error()))
		}
		if _, err := outcomes.Write(answer.Bytes()); err != nil {
			os.Exit(1) // the reader of the outcomes is gone
		}
	}
}
