"""Where the two zones are: the plant behind its service, the hub in a database of its own."""

import os
from pathlib import Path

from ergon_framework.facts.model import Pair, Side
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import Replicator
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.files import TlsFiles
from ergon_framework.facts.stores.postgres import PostgresBoundary

PLANT, HUB = "plant", "hub"


def plant(caller):
    """The plant's service, called with the certificate of *caller*."""
    files = TlsFiles(*(Path(os.environ["CERTIFICATES"]) / name for name in (f"{caller}.crt", f"{caller}.key")), _ca())
    return BoundaryClient(Address(host=os.environ["PLANT"], files=files))


def hub():
    """The hub's own store; the servers of tests do not sync."""
    return PostgresBoundary(os.environ["HUB_DSN"], side=Side.OUTER, accept_loss=True)


def parts():
    return [Replicator(plant(HUB), hub(), Pair(PLANT, HUB), policy=ReplicationPolicy(drain=0.5, poll=0.05))]


def _ca():
    return Path(os.environ["CERTIFICATES"]) / "authority.pem"
