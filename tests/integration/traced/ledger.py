"""The hub: it records the facts of the plant."""

import zones
from plant import RULES

from ergon_framework import consumer
from ergon_framework.facts.connector import AsyncFactConnector


@consumer(AsyncFactConnector(zones.hub(), from_zone=zones.PLANT, to_zone=zones.HUB, reader="ledger"), policy=RULES)
async def book(fact: dict) -> None:
    print("booked", fact["subject"], flush=True)
