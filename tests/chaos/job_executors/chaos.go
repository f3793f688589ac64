// Built together with examples/executors/go/main.go: what a job of the chaos run does, as in work.py.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

var journal *os.File

func note(what, job string, attempt int) {
	if journal == nil {
		path := fmt.Sprintf("%s/%d-%d.journal", os.Getenv("CHAOS_JOURNALS"), os.Getpid(), time.Now().UnixNano())
		journal, _ = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	}
	line, _ := json.Marshal([]any{float64(time.Now().UnixMicro()) / 1e6, what, job, attempt})
	_, _ = journal.Write(append(line, '\n'))
	_ = syscall.Fdatasync(int(journal.Fd()))
}

func work(c call) (any, error) {
	told := c.args[0].(map[string]any)
	job, attempt := c.context["job_id"].(string), int(number(c.context["attempt"]))
	note("start", job, attempt)
	time.Sleep(time.Duration(number(told["takes"]) * float64(time.Second)))
	mode := told["mode"].(string)
	if mode == "print" {
		fmt.Printf("{\"job_id\": %q, \"status\": \"error\", \"error_message\": \"printed\"}\n", job)
	}
	if attempt > int(number(told["until"])) {
		mode = "echo"
	}
	switch mode {
	case "hang":
		time.Sleep(100_000 * time.Second)
	case "crash":
		os.Exit(9)
	case "kill":
		if parent, _ := strconv.Atoi(os.Getenv("CHAOS_PARENT")); os.Getppid() == parent {
			_ = syscall.Kill(parent, syscall.SIGKILL)
		}
		time.Sleep(100_000 * time.Second)
	}
	note("end", job, attempt)
	switch mode {
	case "fail":
		return nil, errors.New("not this time")
	case "retry":
		return nil, retry{0.2}
	}
	return map[string]any{"job": job, "attempt": attempt, "language": "go"}, nil
}

func init() { handlers["chaos.work"] = work }
