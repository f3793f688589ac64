"""Headquarters fetch the shop's facts, with their own certificate, into their own store."""

import os
from pathlib import Path

from ergon_framework.facts import (
    BoundarySide,
    FileContentStore,
    PostgresBoundary,
    ReplicationPolicy,
    Replicator,
    ZonePair,
)
from ergon_framework.facts.service import BoundaryClient, ServiceAddress, TlsFiles


def replicas() -> list[Replicator]:
    names = ("ERGON_FACTS_TLS_CERT", "ERGON_FACTS_TLS_KEY", "ERGON_FACTS_TLS_CA")
    files = TlsFiles(*(Path(os.environ[name]) for name in names))
    shop = BoundaryClient(ServiceAddress(host=os.environ["ERGON_FACTS_SERVER"], files=files, deadline=5))
    store = PostgresBoundary(side=BoundarySide.OUTER, contents=FileContentStore(os.environ["CONTENTS"]))
    policy = ReplicationPolicy(timeout=10, poll=0.5, cap=3)
    return [Replicator(shop, store, ZonePair("shop", "headquarters"), policy=policy)]
