// Put behind examples/executors/node/executor.mjs: what a job of the chaos run does, as in work.py.
import { fdatasyncSync, openSync, writeSync as append } from "node:fs";

let journal = null;

function note(what, job, attempt) {
  journal ??= openSync(`${process.env.CHAOS_JOURNALS}/${process.pid}-${process.hrtime.bigint()}.journal`, "a");
  append(journal, JSON.stringify([Date.now() / 1000, what, job, attempt]) + "\n");
  fdatasyncSync(journal);
}

// Holds the whole process, as a handler that never lets go does.
const block = (seconds) => Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, seconds * 1000);

handlers.set("chaos.work", async ([told], kwargs, context) => {
  const { job_id: job, attempt } = context;
  note("start", job, attempt);
  await new Promise((wake) => setTimeout(wake, told.takes * 1000));
  const mode = attempt <= told.until ? told.mode : "echo";
  if (mode === "hang") block(100_000);
  if (mode === "crash") process.kill(process.pid, "SIGKILL");
  if (mode === "kill") {
    if (process.ppid === Number(process.env.CHAOS_PARENT)) process.kill(process.ppid, "SIGKILL");
    block(100_000);
  }
  if (told.mode === "print") console.log(JSON.stringify({ job_id: job, status: "error", error_message: "printed" }));
  note("end", job, attempt);
  if (mode === "fail") throw new Error("not this time");
  if (mode === "retry") throw new Retry(0.2);
  return { job, attempt, language: "node" };
});
