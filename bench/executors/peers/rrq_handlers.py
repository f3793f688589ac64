"""The handler that RRQ's Python runners have."""

from rrq.registry import Registry
from rrq.runner_settings import PythonRunnerSettings


async def echo(request):
    return request.params["value"]


registry = Registry()
registry.register("echo", echo)
settings = PythonRunnerSettings(registry=registry)
