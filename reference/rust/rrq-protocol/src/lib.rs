//! The messages of the executor protocol, version 1: one JSON object a line.
//!
//! An orchestrator sends an [`ExecutionRequest`], an executor answers with an [`ExecutionOutcome`].

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// The only value of `protocol_version`.
pub const PROTOCOL_VERSION: &str = "1";
/// The longest line in bytes, without its line feed.
pub const MAX_LINE: usize = 16 * 1024 * 1024;
/// The deepest nesting of arrays and objects, the message itself included.
pub const MAX_DEPTH: usize = 64;
/// The longest name or id in characters.
pub const MAX_NAME: usize = 1024;

/// Values of `error_type`. The protocol reserves `handler_not_found`, which is fatal; the others are conventions.
pub mod error_type {
    pub const HANDLER_NOT_FOUND: &str = "handler_not_found";
    pub const UNSUPPORTED_VERSION: &str = "unsupported_version";
    pub const BAD_REQUEST: &str = "bad_request";
    pub const INVALID_RESULT: &str = "invalid_result";
}

/// One job for an executor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecutionRequest {
    pub protocol_version: String,
    pub job_id: String,
    /// The handler, without the prefix that selects an executor.
    pub function_name: String,
    pub args: Vec<Value>,
    pub kwargs: Map<String, Value>,
    pub context: ExecutionContext,
}

/// The circumstances of an attempt. Times are RFC 3339 in UTC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecutionContext {
    pub job_id: String,
    /// The first attempt is 1.
    pub attempt: NonZeroU32,
    pub enqueue_time: String,
    #[serde(default = "default_queue", deserialize_with = "queue_or_default")]
    pub queue_name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<String>,
    /// `traceparent` and `tracestate` as W3C defines them. A value that is not a text is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "texts")]
    pub trace_context: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<String>,
}

fn default_queue() -> String {
    "default".to_string()
}

fn queue_or_default<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_else(default_queue))
}

/// Reads a trace context of any form: a broken one never costs the job.
fn texts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<BTreeMap<String, String>>, D::Error> {
    let Value::Object(carrier) = Value::deserialize(deserializer)? else {
        return Ok(None);
    };
    let text = |(key, value): (String, Value)| value.as_str().map(|value| (key, value.to_string()));
    Ok(Some(carrier.into_iter().filter_map(text).collect()))
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Success,
    Retry,
    Timeout,
    Error,
}

/// The answer to a request. Only `job_id` and `status` are required.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecutionOutcome {
    pub job_id: String,
    pub status: Status,
    #[serde(default)]
    pub result: Value,
    #[serde(default)]
    pub error_message: Option<String>,
    #[serde(default)]
    pub error_type: Option<String>,
    #[serde(default)]
    pub retry_after_seconds: Option<f64>,
}

impl ExecutionOutcome {
    fn new(job_id: &str, status: Status) -> Self {
        let job_id = job_id.to_string();
        Self { job_id, status, result: Value::Null, error_message: None, error_type: None, retry_after_seconds: None }
    }

    pub fn success(job_id: &str, result: Value) -> Self {
        Self { result, ..Self::new(job_id, Status::Success) }
    }

    pub fn error(job_id: &str, error_type: &str, message: &str) -> Self {
        Self::failure(job_id, Status::Error, error_type, message)
    }

    pub fn timeout(job_id: &str, message: &str) -> Self {
        Self::failure(job_id, Status::Timeout, "timeout", message)
    }

    /// Asks for a further attempt, after so many seconds if they are given.
    pub fn retry(job_id: &str, message: &str, after_seconds: Option<f64>) -> Self {
        Self { retry_after_seconds: after_seconds, ..Self::failure(job_id, Status::Retry, "retry", message) }
    }

    fn failure(job_id: &str, status: Status, error_type: &str, message: &str) -> Self {
        let (error_type, error_message) = (Some(error_type.to_string()), Some(message.to_string()));
        Self { error_type, error_message, ..Self::new(job_id, status) }
    }

    /// Returns the line that answers the request; an outcome beyond the limits becomes `invalid_result`.
    pub fn to_line(&self) -> String {
        let refused = |reason: &str| {
            let outcome = Self::error(&self.job_id, error_type::INVALID_RESULT, reason);
            serde_json::to_string(&outcome).expect("an outcome without a result is JSON")
        };
        let mut line = if depth(&self.result) >= MAX_DEPTH {
            refused("the result is nested too deeply")
        } else {
            match serde_json::to_string(self) {
                Ok(line) if line.len() <= MAX_LINE => line,
                Ok(_) => refused("the result is too large"),
                Err(_) => refused("the result is not JSON"),
            }
        };
        line.push('\n');
        line
    }
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(items) => 1 + items.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// A line that is not a request of this version.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// The line names its job, which gets this outcome.
    Answer(ExecutionOutcome),
    /// The line names no job: log the reason and write nothing.
    Silence(String),
}

/// The part of a request that says whom to answer.
#[derive(Deserialize)]
struct Envelope {
    job_id: String,
    #[serde(default)]
    protocol_version: Value,
}

/// Reads one line, with or without its line feed.
pub fn parse_request(line: &[u8]) -> Result<ExecutionRequest, Refusal> {
    // A job_id that occurs twice is an error here, because it is unclear which job to answer.
    let envelope: Envelope = serde_json::from_slice(line)
        .map_err(|error| Refusal::Silence(format!("{} bytes at column {}", line.len(), error.column())))?;
    let job_id = envelope.job_id.as_str();
    if !is_name(job_id) {
        return Err(Refusal::Silence(format!("a job_id has 1 to {MAX_NAME} characters")));
    }
    let refuse = |error_type, message| Refusal::Answer(ExecutionOutcome::error(job_id, error_type, message));
    if envelope.protocol_version.as_str().is_some_and(|version| version != PROTOCOL_VERSION) {
        return Err(refuse(error_type::UNSUPPORTED_VERSION, "this executor speaks version 1"));
    }
    let request: ExecutionRequest = serde_json::from_slice(line)
        .map_err(|_| refuse(error_type::BAD_REQUEST, "a field is missing or of another type"))?;
    if !is_name(&request.function_name) || request.context.job_id != job_id {
        return Err(refuse(error_type::BAD_REQUEST, "a name is empty or too long, or the context is of another job"));
    }
    Ok(request)
}

fn is_name(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.chars().count())
}
