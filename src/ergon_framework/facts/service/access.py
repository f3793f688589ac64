"""Access: who may do what at a boundary, as a pure decision.

The store belongs to its own zones, which append and put there. Every other zone reads what is from it or for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ergon_framework.facts.boundary import KnownObject, LogState
from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown
from ergon_framework.facts.model import SENDER, Pair, check_zone, zone_of_reader
from ergon_framework.facts.service.identity import Identity

#: Readers that a zone may have in a store of other zones.
MAX_READERS = 100


class Access:
    """The rules of one service, whose store belongs to *zones*."""

    def __init__(self, zones: Collection[str], *, max_readers: int = MAX_READERS) -> None:
        for zone in zones:
            check_zone("zone", zone)
        self._own = frozenset(zones)
        self._max_readers = max_readers

    def append_any(self, who: Identity) -> None:
        """Whether *who* may append at all; it is asked before a request is received."""
        if not who.zones & self._own:
            raise AccessDenied(f"facts are appended by {self._owners} only, and this is {who.name}")

    def append(self, who: Identity, zones: Iterable[str]) -> None:
        """Whether *who* may append as all of these zones."""
        for zone in zones:
            if zone not in who.zones:
                # It came from outside, and is repeated below: no more of it than a zone can be.
                check_zone("from_zone", zone)
                raise AccessDenied(f"facts from {zone!r} are appended by that zone only, and this is {who.name}")
            if zone not in self._own:
                raise AccessDenied(
                    f"{zone!r} appends to a store of its own, and this one belongs to {self._owners}: facts from "
                    "elsewhere arrive here over the line"
                )

    def ask(self, who: Identity, from_zone: str) -> None:
        """Whether *who* may ask what became of a fact."""
        if from_zone not in who.zones and who.operator is None:
            raise AccessDenied(f"only {from_zone!r} may ask what became of its facts, and this is {who.name}")

    def look(self, who: Identity, pair: Pair) -> None:
        """Whether *who* may ask how far somebody has come with *pair*."""
        if who.operator is None and not touches(who, pair):
            raise _foreign(who, pair)

    def read(self, who: Identity, pair: Pair, reader: str) -> None:
        """Whether *who* may read *pair* as *reader*, and confirm in that name."""
        if not touches(who, pair):
            raise _foreign(who, pair)
        owner = zone_of_reader(reader, pair)
        if owner not in who.zones:
            raise AccessDenied(
                f"the reader {reader!r} belongs to {owner!r}, and this is {who.name}; whoever reads back what he has "
                f"sent takes a name that begins with {SENDER!r}"
            )

    def max_readers(self, pair: Pair, reader: str) -> int | None:
        """Return how many readers the zone of *reader* may have here; None if it is a zone of the store."""
        return None if zone_of_reader(reader, pair) in self._own else self._max_readers

    def concerns(self, pair: Pair) -> bool:
        """Whether a zone of the store sends or receives the facts of *pair*."""
        return not self._own.isdisjoint(pair)

    def unknown(self, pair: Pair) -> AccessDenied:
        """Return the refusal of a pair that has no facts here and no zone of the store."""
        return AccessDenied(
            f"there are no facts from {pair.from_zone!r} to {pair.to_zone!r} in this store, which belongs to "
            f"{self._owners}; ask where one of the two zones is at home"
        )

    def put(self, who: Identity, zone: str = "") -> str:
        """Return the owner of what *who* stores as *zone*: empty if the zones of the store have it in common.

        A store of one zone needs no owners. In one of several, each zone has names of its own.
        """
        mine = who.zones & self._own
        if not mine or (zone and zone not in mine):
            stored_by = repr(zone) if zone and zone not in who.zones else self._owners
            raise AccessDenied(f"artifacts are stored here by {stored_by} only, and this is {who.name}")
        if len(self._own) == 1:
            return ""
        return zone or (next(iter(mine)) if len(mine) == 1 else "")

    def own_zones(self, who: Identity) -> frozenset[str]:
        """Return the zones of the store that *who* is."""
        return who.zones & self._own

    def owners(self, who: Identity, zone: str = "") -> Sequence[str]:
        """Return whose artifacts are looked through, in this order, when *who* asks for one of *zone*."""
        if zone:
            return (zone, "") if zone in self._own else (zone,)
        if who.zones & self._own:
            return (*sorted(who.zones & self._own), "")
        # A caller that names no owner: the zones of the store are meant, or it reads back what it has sent.
        return ("", *sorted(self._own), *sorted(who.zones))

    def get(self, who: Identity, bucket: str, key: str, known: KnownObject | None) -> None:
        """Whether *who* may read an artifact: its owner, and each zone that a retained fact of the owner is for.

        To any other caller it is not there, whether it is or not. What is not there is missing for its owners too.
        """
        owners = self._own if known is None or not known.zone else frozenset((known.zone,))
        if who.zones & owners:
            return
        named_by = frozenset[Pair]() if known is None else known.named_by
        if not any(pair.from_zone in owners and pair.to_zone in who.zones for pair in named_by):
            raise ArtifactUnknown(
                f"no retained fact of its owner for {who.name} names an artifact {bucket}/{key}; give the zone that "
                "the fact comes from"
            )

    def operate(self, who: Identity) -> str:
        """The name of the operator; nobody else may."""
        if who.operator is None:
            raise AccessDenied(
                f"it takes the certificate of an operator, ergon://operator/NAME, and this is {who.name}"
            )
        return who.operator

    def visible(self, who: Identity, logs: Iterable[LogState]) -> list[LogState]:
        """What of a survey *who* may see."""
        return [log for log in logs if who.operator is not None or touches(who, log.pair)]

    @property
    def _owners(self) -> str:
        return ", ".join(map(repr, sorted(self._own))) or "nobody"


def touches(who: Identity, pair: Pair) -> bool:
    """Whether a pair of zones is from or for *who*."""
    return not who.zones.isdisjoint(pair)


def _foreign(who: Identity, pair: Pair) -> AccessDenied:
    return AccessDenied(
        f"facts from {pair.from_zone!r} to {pair.to_zone!r} are for these two zones only, and this is {who.name}"
    )
