"""Handlers that behave as badly as real ones; run in processes of their own by test_executor_process.py."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time

from ergon_framework import scope
from ergon_framework.executors.registry import HandlerRegistry

registry = HandlerRegistry()
print("printed at import")
os.write(1, b"written at import\n")


@registry.handler
def echo(value):
    return value


@registry.handler
def shout():
    print("printed", flush=True)
    sys.__stdout__.write("written to the original stdout\n")
    os.write(1, b"written to the descriptor\n")
    ctypes.CDLL(None).puts(b"written by a native library")
    ctypes.CDLL(None).fflush(None)
    subprocess.run(["sh", "-c", "echo by a child; echo to all >&1"], check=True)
    return "quiet"


@registry.handler
def child_reads():
    """A child that reads stdin to its end takes no request away."""
    return subprocess.run(["cat"], capture_output=True, check=True, timeout=3).stdout.decode()


@registry.handler
def descriptors():
    """What a child inherits besides the three it should."""
    listing = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, check=True, close_fds=False, text=True)
    return sorted(int(number) for number in listing.stdout.split())


@registry.handler
def fork():
    """Both sides of the fork come back."""
    return "child" if os.fork() == 0 else "parent"


@registry.handler
def leave_a_child():
    """A child that goes on for long after its parent."""
    return subprocess.Popen(["sleep", "60"]).pid


@registry.handler
def leave_a_fork():
    """A child that has all descriptors of its parent, and stays."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


async def wait_forever():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            print("ignored", file=sys.stderr, flush=True)


@registry.handler
async def leave_a_task():
    """Start a task that cannot be cancelled."""
    leaked_tasks.append(asyncio.create_task(wait_forever()))
    await asyncio.sleep(0)


leaked_tasks = []


@registry.handler
def leave_a_thread():
    threading.Thread(target=time.sleep, args=(60,)).start()


@registry.handler
def hang():
    print("hanging", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.01)


@registry.handler
async def wait():
    print("hanging", file=sys.stderr, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print(f"cancelled={scope.current().cancelled}", file=sys.stderr, flush=True)


@registry.handler
def crash():
    os._exit(9)
