"""Mistakes in keywords of a policy and in the arguments of execute."""

from ergon_framework.providers import AsyncProviderBase, ProviderBase, ProviderPolicy, RetryPolicy

ProviderPolicy(retires=2)  # E: Unexpected keyword argument "retires"
ProviderPolicy(retries="2")  # E: incompatible type "str"; expected "int"
ProviderPolicy(timeout=None)  # E: expected "float"
ProviderPolicy(quota=600)  # E: expected "QuotaPolicy"
ProviderPolicy(scope="fleet")  # E: expected "Literal
ProviderPolicy(5)  # E: Too many positional arguments
RetryPolicy(retries=2)  # E: Unexpected keyword argument "retries"


def call(ranks: ProviderBase) -> None:
    ranks.execute(payload={})  # E: Missing named argument "operation"
    ranks.execute(operation="snapshot", payload=[])  # E: expected "dict\[str, Any\]"
    ranks.execute(operation="snapshot", payload={}, tenant="acme")  # E: Unexpected keyword argument "tenant"
    print(ranks.execute(operation="snapshot", payload={}).answer)  # E: has no attribute "answer"


async def call_async(ranks: AsyncProviderBase) -> None:
    print(ranks.execute(operation="snapshot", payload={}).value)  # E: has no attribute "value"
