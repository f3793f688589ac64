"""Define the two zones: the plant behind its service, the hub in its own database."""

import os
from pathlib import Path

from ergon_framework.facts.model import BoundarySide, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicator import Replicator
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.tls import TlsFiles
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

PLANT, HUB = "plant", "hub"


def plant(caller):
    """Return the plant's service, called with the certificate of *caller*."""
    files = TlsFiles(*(Path(os.environ["CERTIFICATES"]) / name for name in (f"{caller}.crt", f"{caller}.key")), _ca())
    return BoundaryClient(ServiceAddress(host=os.environ["PLANT"], files=files))


def hub():
    """Return the hub's own store; test servers do not sync."""
    return PostgresBoundary(os.environ["HUB_DSN"], side=BoundarySide.OUTER, accept_loss=True)


def parts():
    return [Replicator(plant(HUB), hub(), ZonePair(PLANT, HUB), policy=ReplicationPolicy(drain=0.5, poll=0.05))]


def _ca():
    return Path(os.environ["CERTIFICATES"]) / "authority.pem"
