//! An executor with the handlers of the conformance suite. Put your own functions in their place.
//!
//! With the feature `otel` it writes each span as a line of JSON to stderr; a real program sets an OTLP exporter up.

use std::{process, thread, time::Duration};

use rrq_executor::protocol::ExecutionRequest;
use rrq_executor::{run_stdio, Failure, Registry};
use serde_json::Value;

fn main() {
    #[cfg(feature = "otel")]
    spans::install();
    let mut registry = Registry::new();
    registry.register("conformance.echo", |request| Ok(argument(request, "value")));
    registry.register("conformance.fail", |request| Err(Failure::error("ConformanceFailed", &text(request))));
    registry.register("conformance.retry", |request| {
        Err(Failure::Retry { message: "try again".to_string(), after_seconds: Some(seconds(request)) })
    });
    registry.register("conformance.context", |request| Ok(serde_json::to_value(&request.context)?));
    registry.register("conformance.sleep", |request| {
        thread::sleep(Duration::from_secs_f64(seconds(request)));
        Ok(Value::Null)
    });
    registry.register("conformance.print", |request| {
        println!("{}", text(request));
        Ok(Value::Null)
    });
    registry.register("conformance.child", |request| {
        process::Command::new("echo").arg(text(request)).status()?;
        Ok(Value::Null)
    });
    registry.register("conformance.crash", |_| process::abort());
    if let Err(error) = run_stdio(&registry) {
        eprintln!("executor ended: {error}");
        process::exit(1);
    }
}

/// The first argument, by place or by name.
fn argument(request: &ExecutionRequest, name: &str) -> Value {
    request.args.first().or_else(|| request.kwargs.get(name)).cloned().unwrap_or(Value::Null)
}

fn text(request: &ExecutionRequest) -> String {
    argument(request, "text").as_str().unwrap_or_default().to_string()
}

fn seconds(request: &ExecutionRequest) -> f64 {
    argument(request, "seconds").as_f64().unwrap_or(0.0)
}

#[cfg(feature = "otel")]
mod spans {
    use opentelemetry::global;
    use opentelemetry_sdk::error::OTelSdkResult;
    use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};

    #[derive(Debug)]
    struct Stderr;

    impl SpanExporter for Stderr {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            for span in batch {
                let line = serde_json::json!({
                    "span": span.name,
                    "trace_id": span.span_context.trace_id().to_string(),
                    "span_id": span.span_context.span_id().to_string(),
                    "parent_span_id": span.parent_span_id.to_string(),
                    "tracestate": span.span_context.trace_state().header(),
                    "status": format!("{:?}", span.status),
                });
                eprintln!("{line}");
            }
            Ok(())
        }
    }

    pub fn install() {
        global::set_tracer_provider(SdkTracerProvider::builder().with_simple_exporter(Stderr).build());
    }
}
