"""Exception groups: one verdict for the failures of a TaskGroup."""

from __future__ import annotations

from typing import Final

from ergon_framework.errors import Category, ErgonError, error_message, has_valid_verdict
from ergon_framework.task.exceptions import TransactionException

#: Number of members whose texts are kept, and the characters that they share: a failure record keeps 500 of a message.
MAX_MEMBERS: Final = 5
MAX_MEMBERS_CHARS: Final = 400
_MAX_NAME_CHARS: Final = 80
#: The verdict of an exception that carries none.
_DEFAULT_VERDICT: Final = ErgonError()


def classify_group(group: BaseExceptionGroup[BaseException]) -> TransactionException:
    """Give *group* the verdict of its members, those of nested groups included; it becomes the cause.

    It is BUSINESS if all members are, otherwise SYSTEM. It is final if no member can succeed in another attempt, not
    attempted if no member has attempted anything, and temporary if every member may be deferred. Its ``retry_after``
    is the longest of its members.
    """
    members = _flatten(group)
    verdicts = [
        each if isinstance(each, ErgonError) and has_valid_verdict(each) else _DEFAULT_VERDICT for each in members
    ]
    is_business = all(each.category is Category.BUSINESS for each in verdicts)
    codes = {each.code for each in verdicts}
    error = TransactionException(
        _describe_members(group, members),
        Category.BUSINESS if is_business else Category.SYSTEM,
        retry_after=max((each.retry_after for each in verdicts if each.retry_after is not None), default=None),
        final=all(each.final or (not is_business and each.category is Category.BUSINESS) for each in verdicts),
        not_attempted=all(each.not_attempted for each in verdicts),
        temporary=all(each.temporary or each.not_attempted for each in verdicts),
        code=codes.pop() if len(codes) == 1 else None,
    )
    error.__cause__ = group
    return error


def _flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    members: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:  # a loop, because groups may be nested deeper than functions may call
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(reversed(error.exceptions))
        else:
            members.append(error)
    return members


def _describe_members(group: BaseExceptionGroup[BaseException], members: list[BaseException]) -> str:
    shown_members = members[:MAX_MEMBERS]
    length = MAX_MEMBERS_CHARS // len(shown_members)
    texts = [
        _shorten(f"{type(member).__name__}: {error_message(member, raw=True)}", length) for member in shown_members
    ]
    if len(members) > len(shown_members):
        texts.append(f"and {len(members) - len(shown_members)} more")
    return f"{_shorten(error_message(group, raw=True), _MAX_NAME_CHARS)}: {'; '.join(texts)}"


def _shorten(message: str, length: int) -> str:
    return message if len(message) <= length else message[: length - 1] + "…"
