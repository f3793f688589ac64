//! An executor of protocol 1: it reads requests from stdin, calls handlers and writes outcomes to stdout.
//!
//! ```no_run
//! use rrq_executor::{run_stdio, Registry};
//!
//! let mut registry = Registry::new();
//! registry.register("greet", |request| Ok(serde_json::json!({"hello": request.args.first()})));
//! run_stdio(&registry).expect("stdin and stdout are open");
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::panic::{catch_unwind, AssertUnwindSafe};

use rrq_protocol::{error_type, parse_request, ExecutionOutcome, ExecutionRequest, Refusal, MAX_LINE};
use serde_json::Value;

#[cfg(feature = "otel")]
pub mod otel;
pub use rrq_protocol as protocol;

/// Why a handler did not succeed.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    Error {
        error_type: String,
        message: String,
    },
    /// Asks for a further attempt, which the orchestrator grants or not.
    Retry {
        message: String,
        after_seconds: Option<f64>,
    },
    /// The handler's own time limit is over.
    Timeout {
        message: String,
    },
}

impl Failure {
    pub fn error(error_type: &str, message: &str) -> Self {
        Self::Error { error_type: error_type.to_string(), message: message.to_string() }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::error("error", &error.to_string())
    }
}

pub type HandlerResult = Result<Value, Failure>;
type Handler = Box<dyn Fn(&ExecutionRequest) -> HandlerResult>;

/// The handlers of an executor, by name.
#[derive(Default)]
pub struct Registry {
    handlers: HashMap<String, Handler>,
}

impl Registry {
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a handler; a second one of the same name takes its place.
    pub fn register(&mut self, name: &str, handler: impl Fn(&ExecutionRequest) -> HandlerResult + 'static) {
        self.handlers.insert(name.to_string(), Box::new(handler));
    }

    /// Executes one request. A panic in the handler is an error outcome.
    pub fn execute(&self, request: &ExecutionRequest) -> ExecutionOutcome {
        let job_id = request.job_id.as_str();
        let Some(handler) = self.handlers.get(&request.function_name) else {
            let message = format!("handler {:?} is not registered", request.function_name);
            return ExecutionOutcome::error(job_id, error_type::HANDLER_NOT_FOUND, &message);
        };
        #[cfg(feature = "otel")]
        let span = otel::JobSpan::start(request);
        let outcome = match catch_unwind(AssertUnwindSafe(|| handler(request))) {
            Ok(Ok(result)) => ExecutionOutcome::success(job_id, result),
            Ok(Err(Failure::Error { error_type, message })) => ExecutionOutcome::error(job_id, &error_type, &message),
            Ok(Err(Failure::Retry { message, after_seconds })) => {
                ExecutionOutcome::retry(job_id, &message, after_seconds)
            }
            Ok(Err(Failure::Timeout { message })) => ExecutionOutcome::timeout(job_id, &message),
            Err(_) => ExecutionOutcome::error(job_id, "panic", "the handler panicked; stderr says where"),
        };
        #[cfg(feature = "otel")]
        span.end(&outcome);
        outcome
    }

    /// Returns the line that answers *line*; None if the line names no job.
    pub fn answer(&self, line: &[u8]) -> Option<String> {
        match parse_request(line) {
            Ok(request) => Some(self.execute(&request).to_line()),
            Err(Refusal::Answer(outcome)) => Some(outcome.to_line()),
            Err(Refusal::Silence(reason)) => {
                eprintln!("line refused: {reason}");
                None
            }
        }
    }
}

/// Serves stdin until it ends. Descriptor 1 is stderr from then on, also for children of the handlers.
pub fn run_stdio(registry: &Registry) -> io::Result<()> {
    let mut outcomes = take_stdout()?;
    let mut requests = BufReader::new(io::stdin());
    let mut line = Vec::new();
    while read_line(&mut requests, &mut line)? {
        if line.len() > MAX_LINE {
            eprintln!("line refused: more than {MAX_LINE} bytes");
        } else if let Some(answer) = registry.answer(&line) {
            outcomes.write_all(answer.as_bytes())?;
        }
    }
    Ok(())
}

/// Reads one line without its line feed; false at the end. Text without a line feed is not a line.
fn read_line(requests: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    requests.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', line)?;
    if line.last() == Some(&b'\n') {
        line.pop();
        return Ok(true);
    }
    if line.len() <= MAX_LINE {
        return Ok(false);
    }
    // The rest of a line that is too long is dropped.
    loop {
        let chunk = requests.fill_buf()?;
        if chunk.is_empty() {
            return Ok(false);
        }
        let end = chunk.iter().position(|byte| *byte == b'\n');
        let used = end.map_or(chunk.len(), |place| place + 1);
        requests.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

extern "C" {
    fn dup2(old: i32, new: i32) -> i32;
}

/// Keeps the real stdout for outcomes, closed in children, and points descriptor 1 at stderr.
fn take_stdout() -> io::Result<File> {
    let outcomes = io::stdout().as_fd().try_clone_to_owned()?;
    // SAFETY: both descriptors are open, and dup2 touches no memory.
    if unsafe { dup2(2, 1) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(File::from(outcomes))
}
