"""Headquarters fetch the shop's facts, with their own certificate, into their own store."""

import os
from pathlib import Path

from ergon_framework.facts.model import BoundarySide, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import Replicator
from ergon_framework.facts.service.address import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.files import TlsFiles
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.postgres import PostgresBoundary


def replicas() -> list[Replicator]:
    names = ("ERGON_FACTS_TLS_CERT", "ERGON_FACTS_TLS_KEY", "ERGON_FACTS_TLS_CA")
    files = TlsFiles(*(Path(os.environ[name]) for name in names))
    shop = BoundaryClient(ServiceAddress(host=os.environ["ERGON_FACTS_SERVER"], files=files, deadline=5))
    store = PostgresBoundary(side=BoundarySide.OUTER, contents=FileContentStore(os.environ["CONTENTS"]))
    policy = ReplicationPolicy(timeout=10, poll=0.5, cap=3)
    return [Replicator(shop, store, ZonePair("shop", "headquarters"), policy=policy)]
