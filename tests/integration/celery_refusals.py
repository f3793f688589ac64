"""A Celery app with a user's default settings; the provider of its only task rejects every call permanently."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from celery import Celery

from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.celery.task import CeleryProviderTask
from ergon_framework.providers.errors import ProviderBadRequestError

app = Celery("refusals", broker=os.environ["TEST_BROKER"])


class RejectingProvider(ProviderBase):
    provider_name = "refusing"
    capability = "rank_snapshot"

    def _execute_impl(self, **_: Any) -> NoReturn:
        raise ProviderBadRequestError("the provider answered 422")


@app.task(base=CeleryProviderTask, bind=True, provider=RejectingProvider())
def snapshot(self: CeleryProviderTask, payload: dict[str, Any], *, tenant_id: str) -> Any:
    del tenant_id
    return self.call("snapshot", payload)
