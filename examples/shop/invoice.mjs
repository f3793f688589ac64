// An executor that makes invoices; what an executor has to keep to is in docs/executors.md.
import { writeSync } from "node:fs";

const RATES = { AT: 20, DE: 19, FR: 20, SE: 25 };

// Made of the order alone, without a clock: whoever makes it again makes the same.
function invoice({ order, cents, country, placed }) {
  const rate = RATES[country];
  if (rate === undefined) throw new Error(`there is no tax rate for ${country}`);
  const net = Math.round((cents * 100) / (100 + rate));
  return { number: `invoice-${order}`, order, placed, country, rate, net, tax: cents - net, cents };
}

const handlers = new Map([["invoice", invoice]]);

// Only outcomes go to descriptor 1.
console.log = console.info = console.debug = console.error;

function write(outcome) {
  let data = Buffer.from(JSON.stringify(outcome) + "\n");
  while (data.length) {
    try {
      data = data.subarray(writeSync(1, data));
    } catch (error) {
      if (error.code !== "EAGAIN") process.exit(1); // nobody reads the outcomes
    }
  }
}

function take(line) {
  const { job_id, function_name, args } = JSON.parse(line);
  const answer = { job_id, status: "success", result: null, error_message: null, error_type: null, retry_after_seconds: null };
  const handler = handlers.get(function_name);
  if (!handler) {
    return write({ ...answer, status: "error", error_type: "handler_not_found", error_message: `there is no ${function_name}` });
  }
  try {
    write({ ...answer, result: handler(...args) });
  } catch (failed) {
    write({ ...answer, status: "error", error_type: failed.name, error_message: failed.message });
  }
}

// Lines are split by hand: readline also ends lines at U+2028, which JSON allows inside of text.
process.on("SIGTERM", () => process.exit(143));
let held = "";
process.stdin.setEncoding("utf-8").on("data", (chunk) => {
  const lines = (held + chunk).split("\n");
  held = lines.pop();
  lines.forEach(take);
});
