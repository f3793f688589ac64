//! Spans of jobs. Each job is a span `rrq.executor` in the trace of its request.
//!
//! The program chooses the SDK and its exporter with `opentelemetry::global::set_tracer_provider`. A handler that calls other
//! services finds the span in `opentelemetry::Context::current()`.

use std::collections::{BTreeMap, HashMap};

use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{global, Context, ContextGuard, KeyValue};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use rrq_protocol::{ExecutionOutcome, ExecutionRequest, Status as JobStatus};

/// The span of one job, current while the handler runs.
pub struct JobSpan {
    context: Context,
    _current: ContextGuard,
}

impl JobSpan {
    pub fn start(request: &ExecutionRequest) -> Self {
        let carrier = request.context.trace_context.as_ref().map(to_carrier).unwrap_or_default();
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &carrier);
        let tracer = global::tracer("rrq-executor");
        let span = tracer
            .span_builder("rrq.executor")
            .with_kind(SpanKind::Consumer)
            .with_attributes([
                KeyValue::new("rrq.job_id", request.job_id.clone()),
                KeyValue::new("rrq.function_name", request.function_name.clone()),
                KeyValue::new("rrq.queue_name", request.context.queue_name.clone()),
                KeyValue::new("rrq.attempt", i64::from(request.context.attempt.get())),
            ])
            .start_with_context(&tracer, &parent);
        let context = parent.with_span(span);
        let current = context.clone().attach();
        Self { context, _current: current }
    }

    pub fn end(self, outcome: &ExecutionOutcome) {
        let span = self.context.span();
        if outcome.status != JobStatus::Success {
            span.set_status(Status::error(outcome.error_type.clone().unwrap_or_default()));
        }
        span.end();
    }
}

/// Returns the headers that continue the current trace, for a request to another service.
pub fn current_headers() -> HashMap<String, String> {
    let mut headers = HashMap::new();
    TraceContextPropagator::new().inject_context(&Context::current(), &mut headers);
    headers
}

/// Header names are read in lower case.
fn to_carrier(headers: &BTreeMap<String, String>) -> HashMap<String, String> {
    headers.iter().map(|(key, value)| (key.to_lowercase(), value.clone())).collect()
}
