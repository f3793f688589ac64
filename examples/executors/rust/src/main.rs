//! An executor of protocol 1 with serde_json. Put your functions into `handle`.
use serde_json::{json, Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::io::FromRawFd;
use std::{panic, process, thread, time::Duration};

extern "C" {
    fn dup2(old: i32, new: i32) -> i32;
    fn fcntl(fd: i32, command: i32, argument: i32) -> i32;
}
const DUPLICATE_CLOSED_ON_EXEC: i32 = 1030;

enum Failure {
    Unknown,
    Retry(f64),
    Error(String),
}

struct Call<'a> {
    args: &'a [Value],
    kwargs: &'a Map<String, Value>,
    context: &'a Map<String, Value>,
}

impl Call<'_> {
    fn first(&self, name: &str) -> Value {
        self.args.first().or_else(|| self.kwargs.get(name)).cloned().unwrap_or(Value::Null)
    }
    fn text(&self) -> String {
        self.first("text").as_str().unwrap_or_default().to_string()
    }
    fn seconds(&self) -> f64 {
        self.first("seconds").as_f64().unwrap_or(0.0)
    }
}

fn handle(name: &str, call: &Call) -> Result<Value, Failure> {
    match name {
        "exam.echo" => Ok(call.first("value")),
        "exam.fail" => Err(Failure::Error(call.text())),
        "exam.retry" => Err(Failure::Retry(call.seconds())),
        "exam.context" => Ok(Value::Object(call.context.clone())),
        "exam.sleep" => {
            thread::sleep(Duration::from_secs_f64(call.seconds()));
            Ok(Value::Null)
        }
        "exam.print" => {
            println!("{}", call.text());
            Ok(Value::Null)
        }
        "exam.child" => process::Command::new("echo")
            .arg(call.text())
            .status()
            .map(|_| Value::Null)
            .map_err(|error| Failure::Error(error.to_string())),
        "exam.crash" => process::abort(),
        _ => Err(Failure::Unknown),
    }
}

fn outcome(job_id: &str, status: &str, result: Value, kind: Value, message: Value, after: Value) -> Value {
    json!({"job_id": job_id, "status": status, "result": result, "error_message": message,
           "error_type": kind, "retry_after_seconds": after})
}

fn failed(job_id: &str, kind: &str, message: &str) -> Value {
    outcome(job_id, "error", Value::Null, json!(kind), json!(message), Value::Null)
}

fn execute(job_id: &str, request: &Value) -> Value {
    let version = &request["protocol_version"];
    if version.is_string() && version != "1" {
        return failed(job_id, "unsupported_version", "version 1 is spoken here");
    }
    let (name, args, kwargs, context) = match (
        request["function_name"].as_str(),
        request["args"].as_array(),
        request["kwargs"].as_object(),
        request["context"].as_object(),
    ) {
        (Some(name), Some(args), Some(kwargs), Some(context)) if version == "1" => (name, args, kwargs, context),
        _ => return failed(job_id, "bad_request", "a field is missing or of another type"),
    };
    let call = Call { args, kwargs, context };
    match panic::catch_unwind(panic::AssertUnwindSafe(|| handle(name, &call))) {
        Ok(Ok(result)) => outcome(job_id, "success", result, Value::Null, Value::Null, Value::Null),
        Ok(Err(Failure::Unknown)) => failed(job_id, "handler_not_found", &format!("there is no {name}")),
        Ok(Err(Failure::Retry(after))) => {
            outcome(job_id, "retry", Value::Null, Value::Null, Value::Null, json!(after))
        }
        Ok(Err(Failure::Error(message))) => failed(job_id, "error", &message),
        Err(_) => failed(job_id, "panic", "the handler panicked; stderr says where"),
    }
}

fn main() {
    // Descriptor 1 becomes stderr before any handler runs; only this file still has the real one, and no child.
    let mut outcomes = unsafe {
        let kept = fcntl(1, DUPLICATE_CLOSED_ON_EXEC, 3);
        if kept < 0 || dup2(2, 1) < 0 {
            process::exit(2);
        }
        File::from_raw_fd(kept)
    };
    let mut requests = BufReader::new(std::io::stdin());
    let mut line = Vec::new();
    loop {
        line.clear();
        match requests.read_until(b'\n', &mut line) {
            Ok(_) if line.ends_with(b"\n") => {}
            _ => return, // what has no line feed is no line
        }
        let request: Value = match serde_json::from_slice(&line) {
            Ok(request) => request,
            Err(error) => {
                eprintln!("no JSON: a line of {} bytes: {}", line.len(), error);
                continue;
            }
        };
        let Some(job_id) = request["job_id"].as_str() else {
            eprintln!("no request: a line of {} bytes", line.len());
            continue;
        };
        let answer = format!("{}\n", execute(job_id, &request));
        if outcomes.write_all(answer.as_bytes()).is_err() {
            process::exit(1); // nobody reads the outcomes
        }
    }
}
