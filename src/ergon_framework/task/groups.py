"""Exception groups: one verdict for the failures of a TaskGroup."""

from __future__ import annotations

from typing import Final

from ergon_framework.errors import Category, ErgonError, is_sound, text
from ergon_framework.task.exceptions import TransactionException

#: Members whose texts are kept, and the characters that they share: a failure record keeps 500 of a message.
MAX_MEMBERS: Final = 5
MEMBERS_LENGTH: Final = 400
_NAME_LENGTH: Final = 80
#: The verdict of an exception that carries none.
_UNKNOWN: Final = ErgonError()


def classify_group(group: BaseExceptionGroup[BaseException]) -> TransactionException:
    """Give *group* the verdict of its members, those of nested groups included; it becomes the cause.

    It is BUSINESS if all members are, otherwise SYSTEM. It is final if no member can succeed in
    another attempt, later if no member has tried anything, and temporary if every member may be deferred.
    It waits for the longest ``retry_after``.
    """
    members = _flatten(group)
    verdicts = [each if isinstance(each, ErgonError) and is_sound(each) else _UNKNOWN for each in members]
    is_business = all(each.category is Category.BUSINESS for each in verdicts)
    codes = {each.code for each in verdicts}
    error = TransactionException(
        _describe_members(group, members),
        Category.BUSINESS if is_business else Category.SYSTEM,
        retry_after=max((each.retry_after for each in verdicts if each.retry_after is not None), default=None),
        final=all(each.final or (not is_business and each.category is Category.BUSINESS) for each in verdicts),
        later=all(each.later for each in verdicts),
        temporary=all(each.temporary or each.later for each in verdicts),
        code=codes.pop() if len(codes) == 1 else None,
    )
    error.__cause__ = group
    return error


def _flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    members: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:  # a loop, because groups may be nested deeper than functions may call
        error = waiting.pop()
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(reversed(error.exceptions))
        else:
            members.append(error)
    return members


def _describe_members(group: BaseExceptionGroup[BaseException], members: list[BaseException]) -> str:
    shown = members[:MAX_MEMBERS]
    length = MEMBERS_LENGTH // len(shown)
    texts = [_shorten(f"{type(member).__name__}: {text(member, raw=True)}", length) for member in shown]
    if len(members) > len(shown):
        texts.append(f"and {len(members) - len(shown)} more")
    return f"{_shorten(text(group, raw=True), _NAME_LENGTH)}: {'; '.join(texts)}"


def _shorten(message: str, length: int) -> str:
    return message if len(message) <= length else message[: length - 1] + "…"
