// An executor of protocol 1 with Node's own modules. Put your functions into `handlers`.
import { spawnSync } from "node:child_process";
import { writeSync } from "node:fs";

class Retry extends Error {
  constructor(seconds) {
    super("later");
    this.seconds = seconds;
  }
}

// A handler gets the positional arguments, the keyword arguments and the context.
const handlers = new Map([
  ["conformance.echo", ([value], kwargs) => (value === undefined ? kwargs.value : value)],
  ["conformance.fail", ([message]) => { throw new Error(message); }],
  ["conformance.retry", ([seconds]) => { throw new Retry(seconds); }],
  ["conformance.context", (args, kwargs, context) => context],
  ["conformance.sleep", ([seconds]) => new Promise((wake) => setTimeout(wake, seconds * 1000, null))],
  ["conformance.print", ([text]) => { console.log(text); process.stdout.write(text + "\n"); return null; }],
  ["conformance.child", ([text]) => { spawnSync("echo", [text], { stdio: ["ignore", 2, 2] }); return null; }],
  ["conformance.crash", () => process.kill(process.pid, "SIGKILL")],
]);

// Outcomes are the only thing that goes to descriptor 1. Node cannot point it elsewhere, so what prints is redirected,
// and children are given stderr in its place.
process.stdout.write = process.stderr.write.bind(process.stderr);
console.log = console.info = console.debug = console.error;

function write(outcome) {
  let data = Buffer.from(JSON.stringify(outcome) + "\n");
  while (data.length) {
    try {
      data = data.subarray(writeSync(1, data));
    } catch (error) {
      if (error.code !== "EAGAIN") process.exit(1); // the reader of the outcomes is gone
    }
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

async function execute(request) {
  const blank = { status: null, result: null, error_message: null, error_type: null, retry_after_seconds: null };
  const answer = (told) => ({ job_id: request.job_id, ...blank, ...told });
  const error = (error_type, error_message) => answer({ status: "error", error_type, error_message });
  const { protocol_version: version, function_name: name, args, kwargs, context } = request;
  if (typeof version === "string" && version !== "1") return error("unsupported_version", "version 1 is spoken here");
  if (version !== "1" || typeof name !== "string" || !Array.isArray(args) || !isObject(kwargs) || !isObject(context))
    return error("bad_request", "a field is missing or of another type");
  const handler = handlers.get(name);
  if (!handler) return error("handler_not_found", `there is no ${name}`);
  try {
    const result = await handler(args, kwargs, context);
    return answer({ status: "success", result: result === undefined ? null : result });
  } catch (failed) {
    if (failed instanceof Retry) return answer({ status: "retry", retry_after_seconds: failed.seconds });
    return error(failed.name ?? "Error", String(failed.message ?? failed));
  }
}

async function take(line) {
  let request;
  try {
    request = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(line));
  } catch {
    console.error(`no JSON: a line of ${line.length} bytes`);
    return;
  }
  if (!isObject(request) || typeof request.job_id !== "string") {
    console.error(`no request: a line of ${line.length} bytes`);
    return;
  }
  write(await execute(request));
}

// Lines are split by hand: readline also ends lines at U+2028, which JSON allows inside of text.
process.on("SIGTERM", () => process.exit(143));
let held = [];
process.stdin.on("data", (chunk) => {
  for (let end; (end = chunk.indexOf(10)) >= 0; chunk = chunk.subarray(end + 1)) {
    held.push(chunk.subarray(0, end));
    take(Buffer.concat(held));
    held = [];
  }
  if (chunk.length) held.push(chunk);
});
