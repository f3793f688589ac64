"""The rules of redaction: which names and which forms of text are secrets, for records, logs, spans and output.

Every rule takes time proportional to the text: error texts come from outside, and may be long and hostile.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

#: The replacement of a secret.
HIDDEN: Final = "[hidden]"
#: The environment variables that add rules; the settings in ``ergon.toml`` have the same keys.
NAMES_VARIABLE: Final = "ERGON_TELEMETRY__REDACT_NAMES"
PATTERNS_VARIABLE: Final = "ERGON_TELEMETRY__REDACT_PATTERNS"


def _split_list(names: str) -> list[str]:
    return names.split()


# -- names ----------------------------------------------------------------------------------------

#: Secret as a separate word within a name: "db_password" and "apiToken", but not "compass" or "author".
_SECRET_WORDS: Final = frozenset(
    _split_list(
        "pass password passwd passphrase passcode passkey pwd pw secret token auth authorization "
        "credential cookie signature sig dsn jwt otp totp cvv cvc apikey sessionid dbpass userpass mypass "
        "nkey sas"
    )
)
#: Secret at the end of a word without inner capitals: PGPASSWORD, csrftoken, clientsecret.
_SECRET_ENDINGS: Final = _split_list(
    "password passwd passphrase passcode secret token apikey accesskey secretkey privatekey "
    "accountkey authkey sessionid cookie"
)
#: Secret if these words follow each other in a name.
_SECRET_SEQUENCES: Final = tuple(
    tuple(each.split("-"))
    for each in _split_list(
        "api-key access-key private-key account-key secret-key shared-key storage-key encryption-key "
        "signing-key master-key license-key ssh-key session-id session-key nkeys-seed nkey-seed "
        "connection-string conn-str"
    )
)
#: Each of the names above contains one of these; "%" stands for names with percent-encoded characters.
_SECRET_STEMS: Final = tuple(
    _split_list("pass pw secret token auth cred cookie sig dsn jwt otp cvv cvc key session sas conn sid %")
)
#: Secret only as the name of a parameter of an address, such as ``?key=…``.
_SECRET_PARAMETERS: Final = frozenset({"key", "sid"})
_WORD_PATTERN: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]++|[A-Z]++|[^\W\d_A-Za-z]++")
#: Of a longer name only the end is compared.
_MAX_NAME_CHARS: Final = 256


class _RedactionRules(NamedTuple):
    """The rules that the settings add to the built-in ones."""

    names: tuple[tuple[str, ...], ...] = ()
    patterns: tuple[re.Pattern[str], ...] = ()


_configured_rules: _RedactionRules | None = None
#: The passwords of the addresses that this process uses (``learn_address`` adds them), and the pattern that hides them.
_known_passwords: dict[str, None] = {}
_known_passwords_pattern: re.Pattern[str] | None = None
_MAX_KNOWN_PASSWORDS: Final = 256


def configure(names: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
    """Add *names* of secrets and *patterns* of secret text to the built-in rules of this process.

    A call replaces the rules of an earlier call. A name matches in every style. The whole match of a pattern is
    hidden. Raises ValueError, which names it, if a name or a pattern is invalid.
    """
    global _configured_rules  # noqa: PLW0603 - one set of rules for each process
    _configured_rules = _RedactionRules(tuple(map(_parse_name, names)), tuple(map(compile_pattern, patterns)))
    _is_secret.cache_clear()


def load_environment(environ: Mapping[str, str] | None = None) -> None:
    """Add the rules that the environment names, unless :func:`configure` was called; ValueError if one is invalid."""
    if _configured_rules is not None:
        return
    variables = os.environ if environ is None else environ
    lists = [_parse_list(variables.get(name)) for name in (NAMES_VARIABLE, PATTERNS_VARIABLE)]
    for name, value in variables.items():
        if name.startswith("ERGON_") and name.endswith(("__DSN", "__URL")):
            learn_address(value)
    try:
        configure(*lists)
    except ValueError as error:
        raise ValueError(f"{NAMES_VARIABLE} or {PATTERNS_VARIABLE} is invalid: {error}") from error


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile *pattern*; raise ValueError, which names it, if it is invalid or matches the empty text."""
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    if compiled.search("") is not None:
        raise ValueError(f"pattern {pattern!r} is invalid: it matches empty text; match at least one character")
    return compiled


def check_name(name: str) -> None:
    """Raise ValueError, which names it, if *name* has no letter."""
    _parse_name(name)


def _parse_name(name: str) -> tuple[str, ...]:
    words = _split_name(name)
    if not words:
        raise ValueError(f"name {name!r} is invalid: it has no letter; use a name such as customer_pin")
    return words


def _parse_list(value: str | None) -> list[str]:
    """Parse the value of a variable as the settings do: a list of TOML, or one entry."""
    if not value:
        return []
    try:
        entries: Any = tomllib.loads(f"value = {value}").get("value")
    except (ValueError, RecursionError):
        entries = value
    return [str(entry) for entry in entries] if isinstance(entries, list) else [str(entries)]


def _load_rules() -> _RedactionRules:
    load_environment()
    return _configured_rules or _RedactionRules()


def is_secret_name(name: str) -> bool:
    """Return whether *name* is that of a secret, in any style: snake_case, camelCase, kebab-case, upper case."""
    _load_rules()
    return _is_secret(name[-_MAX_NAME_CHARS:])


@lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    words = _split_name(unquote(name) if "%" in name else name)
    if any(_is_secret_word(word) for word in words):
        return True
    return any(_contains_sequence(words, sequence) for sequence in (*_SECRET_SEQUENCES, *_load_rules().names))


def _split_name(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD_PATTERN.findall(name.replace("OAuth", "Oauth")))


def _is_secret_word(word: str) -> bool:
    return any(
        each in _SECRET_WORDS or any(each.endswith(end) for end in _SECRET_ENDINGS)
        for each in (word, word.removesuffix("s"))
    )


def _contains_sequence(words: tuple[str, ...], sequence: tuple[str, ...]) -> bool:
    """Return whether *words* contain *sequence*, also with a plural last word or joined into one word."""
    last = (sequence[-1], sequence[-1] + "s")
    for start in range(len(words) - len(sequence) + 1):
        part = words[start : start + len(sequence)]
        if part[:-1] == sequence[:-1] and part[-1] in last:
            return True
    return "".join(sequence) in words


# -- text -----------------------------------------------------------------------------------------


def redact_text(text: str) -> str:
    """Return *text* without secrets: values of secret names, values of a known form, and credentials in addresses.

    Text that was redacted before stays unchanged.
    """
    try:
        rules = _load_rules()
    except ValueError:  # the user's rules are unknown, so any text may be secret
        return HIDDEN
    text = _hide_in_addresses(_hide_forms(text))
    # Most texts contain nothing that looks like the name of a secret.
    lower = text.lower()
    if rules.names or any(stem in lower for stem in _SECRET_STEMS):
        text = _hide_in_prose(_hide_assigned_values(text), lower)
    text = _hide_logins(_hide_schemes(text, lower))
    for pattern in (_known_passwords_pattern, *rules.patterns):
        text = text if pattern is None else pattern.sub(HIDDEN, text)
    return text


def redact_address(address: str) -> str:
    """Return *address*, one address or a list of them, without its credentials, whatever their characters."""
    if "://" not in address:
        return redact_text(_KEYWORD.sub(_hide_third_group, address))
    redacted = [_redact_one_address(each) for each in _NEXT_ADDRESS.split(address)]
    return redact_text(",".join(redacted))


def learn_address(address: str) -> None:
    """Hide the password of *address* in all texts: a client that misparses an address quotes parts of it."""
    _learn_pieces(_list_password_parts(address))


def learn_password(password: str) -> None:
    """Hide *password*, which is not part of an address, in all texts."""
    _learn_pieces([password])


def _learn_pieces(candidates: list[str]) -> None:
    global _known_passwords_pattern  # noqa: PLW0603 - one set of rules for each process
    pieces = [piece for piece in candidates if len(piece) >= _MIN_KNOWN_CHARS and not _is_ordinary(piece)]
    if not _known_passwords.keys() >= set(pieces):
        _known_passwords.update(dict.fromkeys(pieces))
        while len(_known_passwords) > _MAX_KNOWN_PASSWORDS:
            del _known_passwords[next(iter(_known_passwords))]
        alternatives = "|".join(re.escape(piece) for piece in sorted(_known_passwords, key=len, reverse=True))
        _known_passwords_pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{alternatives})(?![A-Za-z0-9])")


def hide_known_password(text: str, address: str) -> str:
    """Return *text*, which is about *address*, without any part of its password."""
    text = redact_text(text)
    for piece in _list_password_parts(address):
        # A short piece may be part of an ordinary word.
        preceding = r"[\"'(@:/= ]" if len(piece) < _MIN_KNOWN_CHARS else "(?<![A-Za-z0-9])"
        text = re.sub(rf"({preceding}){re.escape(piece)}(?![A-Za-z0-9])", rf"\1{HIDDEN}", text)
    return text


#: A shorter password is hidden only within addresses and in texts about its address.
_MIN_KNOWN_CHARS: Final = 6
#: Common example passwords: hidden only within addresses.
_COMMON_PASSWORDS: Final = frozenset(_split_list("guest postgres password secret admin default public ergon"))


#: Schemes whose addresses may name a user without a password; in other schemes a lone name may be a token.
_USER_ONLY_SCHEMES: Final = frozenset(_split_list("postgres postgresql amqp amqps"))


def _list_password_parts(address: str) -> list[str]:
    """List the password of *address*, also decoded, and the parts that a client that misparses it may show."""
    pieces: dict[str, None] = {}
    if "://" not in address:
        values = [match[3].strip("'") for match in _KEYWORD.finditer(address) if is_secret_name(match[2])]
        pieces.update(dict.fromkeys(value for value in values if len(value) > 1 and value not in _COMMON_PASSWORDS))
    for single in _NEXT_ADDRESS.split(address):
        scheme, _, rest = single.partition("://")
        login, at, server = rest.rpartition("@")
        user, colon, password = login.partition(":")
        if not at or not login or (not colon and scheme in _USER_ONLY_SCHEMES):
            continue
        credential = password if colon else user
        parts = [credential, unquote(credential), *re.split(r"[/@:?#]", credential)]
        ordinary = {user if colon else "", *re.split(r"[/:?#,@]", server), *_COMMON_PASSWORDS}
        pieces.update(dict.fromkeys(part for part in parts if len(part) > 1 and part not in ordinary))
    return sorted(pieces, key=len, reverse=True)


def _redact_one_address(address: str) -> str:
    scheme, mark, rest = address.partition("://")
    login, _, server = rest.rpartition("@")
    before = rest.partition("?")[0]
    if "@" not in before and ":" not in before:
        login, server = "", rest  # the @ belongs to the parameters
    redacted_login = f"{HIDDEN}@" if login else ""
    return f"{scheme}{mark}{redacted_login}{_PARAMETER.sub(_hide_third_group, server)}"


#: A keyword of libpq or a parameter of an address, with its whole value.
_KEYWORD: Final = re.compile(r"((\w++)\s*+=\s*+)('(?:[^'\\]|\\.)*+'?|(?:[^\s\\]|\\.)*+)", re.DOTALL)
_PARAMETER: Final = re.compile(r"([?&]([^=&]++)=)([^&]*+)")


# -- values of a known form -------------------------------------------------------------------------

_PEM: Final = re.compile(r"-----BEGIN [A-Z0-9 ]{1,40}-----.*?(?:-----END [A-Z0-9 ]{1,40}-----|\Z)", re.DOTALL)
_FORMS: Final = re.compile(
    r"""(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))(?:
      eyJ[\w-]{8,}+\.[\w-]++(?:\.[\w-]*+){0,3}                          # JWT, JWE
    | [srp]k_(?:live|test)_\w{4,}+ | whsec_\w{8,}+                        # Stripe
    | gh[pousr]_\w{8,}+ | github_pat_\w{8,}+                             # GitHub
    | gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt)-[\w-]{8,}+               # GitLab
    | glsa_\w{8,}+ | glc_[\w+/=]{8,}+ | sntry[su]_[\w+/=]{8,}+            # Grafana, Sentry
    | (?:AKIA|ASIA)[A-Za-z0-9]{12,}+                                     # AWS
    | xox[abeoprs](?:\.xox[bp])?-[\w-]{8,}+ | xapp-[\w-]{8,}+            # Slack
    | AIza[\w-]{12,}+ | ya29\.[\w.-]{8,}+ | GOCSPX-[\w-]{8,}+            # Google
    | sk-(?:ant-|proj-|or-|svcacct-)?[A-Za-z0-9][\w-]{15,}+              # model providers
    | SG\.[\w-]{8,}+\.[\w-]{8,}+ | npm_[A-Za-z0-9]{16,}+ | pypi-[\w-]{16,}+
    | hf_[A-Za-z0-9]{16,}+ | do[opr]_v1_\w{8,}+ | shp(?:at|ss|ca|pa)_\w{8,}+ | sq0(?:csp|atp)-[\w-]{8,}+
    | hv[sbr]\.[\w-]{8,}+ | dapi[0-9a-f]{16,}+ | lin_(?:api|oauth)_\w{8,}+ | AGE-SECRET-KEY-1[A-Z0-9]{8,}+
    | dp\.(?:st|pt|sa|ct)\.[\w.-]{8,}+ | ATATT3[\w=-]{8,}+
    | NRAK-[A-Z0-9]{8,}+ | ntn_\w{16,}+ | rubygems_[0-9a-f]{16,}+ | pul-[0-9a-f]{16,}+ | PMAK-[\w-]{16,}+
    | \d{8,10}:AA[\w-]{30,}+                                             # Telegram
    )""",
    re.VERBOSE,
)
#: Each of the forms above contains one of these.
_FORM_MARKERS: Final = tuple(
    _split_list(
        "eyJ _live_ _test_ whsec_ ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- gldt- glrt- glcbt- glptt- glft- glsoat- "
        "glagent- glimt- glsa_ glc_ sntry AKIA ASIA xox xapp- AIza ya29. GOCSPX- sk- SG. npm_ pypi- hf_ _v1_ shpat_ "
        "shpss_ shpca_ shppa_ sq0 hvs. hvb. hvr. dapi lin_ AGE- dp. ATATT3 NRAK- ntn_ rubygems_ pul- PMAK- :AA"
    )
)
#: The seed of a NATS key.
_SEED: Final = re.compile(r"(?<![A-Za-z0-9])S[UAOCNX][A-Z2-7]{56}(?![A-Za-z0-9])")
_MIN_SEED_CHARS: Final = 58
#: The rest of such an address is a secret: it allows posting there.
_WEBHOOKS: Final = re.compile(
    r"(hooks\.slack\.com/[a-z]{1,20}/|discord(?:app)?\.com/api/webhooks/|\.webhook\.office\.com/[a-z0-9]{1,20}/"
    r"|outlook\.office(?:365)?\.com/webhook/|api\.telegram\.org/bot|hooks\.zapier\.com/hooks/catch/"
    r"|chat\.googleapis\.com/v1/spaces/)[^\s\"'<>\[][^\s\"'<>]*+",
    re.IGNORECASE,
)


_WEBHOOK_MARKERS: Final = ("hook", "telegram.org", "chat.googleapis")


def _hide_forms(text: str) -> str:
    """Hide text that has the form of a secret: PEM blocks, tokens of known services, seeds, webhook addresses."""
    if "-----BEGIN " in text:
        text = _PEM.sub(HIDDEN, text)
    if any(mark in text for mark in _FORM_MARKERS):
        text = _FORMS.sub(HIDDEN, text)
    if len(text) >= _MIN_SEED_CHARS:
        text = _SEED.sub(HIDDEN, text)
    return (
        _WEBHOOKS.sub(rf"\1{HIDDEN}", text)
        if "/" in text and any(mark in text.lower() for mark in _WEBHOOK_MARKERS)
        else text
    )


# -- addresses -------------------------------------------------------------------------------------

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}\Z")
_NEXT_ADDRESS: Final = re.compile(r"[,;|](?=[A-Za-z][A-Za-z0-9+.-]{0,30}://)")
_NON_SPACE_RUN: Final = re.compile(r"\S*+")
_PORT: Final = re.compile(r"\d{1,5}(?:[,\"'].*+)?\Z")
_CLOSING_QUOTES: Final = {'"': '"', "'": "'", "`": "`", "<": ">", "(": ")", "[": "]", "{": "}"}


def _hide_in_addresses(text: str) -> str:
    """Hide the login of every address in *text*.

    *mark* is the position of the present ``://``, *done* the end of the text that is copied already, and *run* the end
    of the characters that follow up to a space: it is found once for several addresses, so that the time stays linear.
    """
    if "://" not in text or "@" not in text:
        return text
    parts: list[str] = []
    done, run, mark = 0, 0, text.find("://")
    while mark >= 0:
        start = mark + 3
        if run < start:
            run = _NON_SPACE_RUN.match(text, start).end()  # type: ignore[union-attr] # always matches, possibly nothing
        match = _SCHEME.search(text[max(done, mark - 31) : mark])
        scheme = "" if match is None else match[0].lower()
        end = _find_address_end(text, mark - len(scheme), start, run)
        login = _find_login_end(text[start:end], scheme)
        if login:
            parts += [text[done:start], HIDDEN]
            done = start + login
        mark = text.find("://", end)
    return "".join([*parts, text[done:]])


def _find_address_end(text: str, before: int, start: int, end: int) -> int:
    """Return the end of the address that begins at *before*: its closing quote, or the next address of a list.

    *start* is the end of its ``://``; the address ends at *end* at the latest, where a space follows.
    """
    closing = _CLOSING_QUOTES.get(text[before - 1]) if before else None
    if closing is not None:
        position = text.find(closing, start, end)
        # A password may contain the quote itself.
        end = position if position >= 0 and "@" not in _read_until_separator(text, position, end) else end
    following = _NEXT_ADDRESS.search(text, start, end)
    return end if following is None else following.start()


def _read_until_separator(text: str, quote: int, end: int) -> str:
    """Return the text between *quote*, the position of a quote, and the next quote or comma."""
    return re.split(r"[\"'`,;:<>()\[\]{}]", text[quote + 1 : min(end, quote + 257)], maxsplit=1)[0]


def _find_login_end(rest: str, scheme: str) -> int:
    """Return the length of the login in *rest*, the text after ``://``; 0 if it has none."""
    last = rest.rfind("@")
    if last <= 0:
        return 0
    server = re.split(r"[/?#]", rest, maxsplit=1)[0]
    name, colon, port = server.partition(":")
    is_server = scheme.partition("+")[0] in _SERVER_SCHEMES
    if is_server and scheme not in _TOKEN_SCHEMES and ":" not in rest[:last]:
        return 0  # a user without a password
    # A password may contain any character, also those that end the name of a server. Text after a colon belongs to a
    # login unless it is a port, or the colon is one of an IPv6 address in brackets.
    if "@" in server or (colon and not (name and _PORT.match(port)) and "]" not in server):
        return last
    return max(0, rest.partition("?")[0].rfind("@")) if is_server else 0


#: Schemes whose addresses have no @ in a path; those of a web server may have one.
_SERVER_SCHEMES: Final = frozenset(
    _split_list(
        "amqp amqps redis rediss nats tls postgres postgresql mysql mariadb mongodb mssql oracle kafka "
        "mqtt mqtts smtp smtps ldap ldaps ftp ftps sftp ssh imap imaps clickhouse cockroachdb stomp "
        "memcached valkey"
    )
)

#: Schemes whose lone text before the @ may be a token; in other schemes it is the name of a user.
_TOKEN_SCHEMES: Final = frozenset({"nats", "tls"})

# -- values of secret names -----------------------------------------------------------------------

#: A name, its closing quote, and the separator before its value. Names may be percent-encoded.
_NAME: Final = r"[\w.-]*+(?:%(?!3[AaDd]|2[26])[0-9A-Fa-f]{2}[\w.-]*+)*+"
_ASSIGNMENT: Final = re.compile(
    rf"""(?:(?<![\w.%-])|(?<=%2[026])|(?<=%3[AaDd]))(?=[\w.%-])(?P<name>{_NAME}(?:\ (?:key|id|string)\b)?+)
    (?P<quote>(?:\\*+["'`]|%22)?+\]?+)
    (?:\s{{0,8}}+(?P<sign>=>|:=|==?|:|%3[AaDd])\s{{0,16}}+(?:%20|%22|\+)*+ | (?P<comma>,\s{{0,4}}+)(?=b?\\*["']))""",
    re.VERBOSE | re.IGNORECASE,
)
_OPENING_QUOTE: Final = re.compile(r"(?:[bruf]{0,2})(\\*+)([\"'`])", re.IGNORECASE)
_REST_OF_LINE: Final = re.compile(r"[^\r\n]*+")
#: A bare value ends at a space, a closing bracket, or a separator before the next name.
_BARE_VALUE: Final = re.compile(
    r"(?:[^\s,;&)}\]<>%]|%(?!26)|[,;&](?![\s,;&]|\Z|[\"']?[\w.-]{1,64}[\"']?\s?[=:])|[)}\]](?=[A-Za-z0-9]))*+"
)
_ENCODED_VALUE: Final = re.compile(r"(?:[^\s&\"'<>,;%]|%(?!26|22))*+")
_WHOLE_LINE_NAMES: Final = re.compile(r"(?:^|[-_.])(?:authorization|cookie)\Z", re.IGNORECASE)
# In these three, group 2 is a name, and group 3 a value that is hidden if the name is that of a secret: an XML element,
# a field of a multipart form, and an option of a command line.
_TAG: Final = re.compile(r"(<(?:[\w.-]++:)?([\w.-]++)(?:\s[^<>]*+)?>(?:<!\[CDATA\[)?)([^<]++)(?=</)")
_FIELD: Final = re.compile(r"(\bname=\\?\"([\w.-]++)\\?\"(?:\r?\n|\\r\\n|\\n){1,4})([^\s\\]++)")
_FLAG: Final = re.compile(r"(?<![\w-])(--?([\w-]++)(?:[\"']?,)?[ \t]{1,4})(?!-)(\[hidden\]|\"[^\"]*+\"|'[^']*+'|\S++)")


def _hide_assigned_values(text: str) -> str:
    """Hide the values of secret names: in XML, forms and command lines, and after a separator such as ``=``."""
    if "<" in text:
        text = _TAG.sub(_hide_third_group, text)
    if "name=" in text:
        text = _FIELD.sub(_hide_third_group, text)
    if "-" in text:
        text = _FLAG.sub(_hide_third_group, text)
    parts: list[str] = []
    done = 0
    for start, end in _iter_assigned_values(text):
        parts += [text[done:start], HIDDEN]
        done = end
    return "".join([*parts, text[done:]]) if parts else text


def _hide_third_group(match: re.Match[str]) -> str:
    """Hide the value, group 3 of *match*, if group 2 is the name of a secret; group 1 is the text before the value."""
    return f"{match[1]}{HIDDEN}" if is_secret_name(match[2]) else match[0]


def _iter_assigned_values(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each value that is assigned to the name of a secret."""
    position = 0
    while (match := _ASSIGNMENT.search(text, position)) is not None:
        position = match.end()
        name, first = match["name"], match.start()
        if match["comma"] is not None:
            # Pairs of headers are tuples; a list of names contains no pairs.
            opening = text[max(0, first - 3) : first]
            if "(" not in opening or not any(quote in opening for quote in "\"'"):
                continue
        if not is_secret_name(name) and not (
            name.lower() in _SECRET_PARAMETERS and text[first - 1 : first] in ("?", "&")
        ):
            continue
        end = _find_value_end(text, match)
        if end > position:
            yield position, end
            position = end


def _find_value_end(text: str, match: re.Match[str]) -> int:
    """Return the end of the value after *match*: of quoted text, brackets, a header line, or a bare value."""
    start = match.end()
    if text.startswith(HIDDEN, start):
        return start + len(HIDDEN)
    opening = _OPENING_QUOTE.match(text, start)
    if opening is not None:
        return _find_quoted_end(text, opening)
    if _WHOLE_LINE_NAMES.search(match["name"]) and match["sign"] == ":":
        return _find_line_end(text, match.start(), start)
    if text[start : start + 1] in ("{", "[", "("):
        return _find_brackets_end(text, start)
    pattern = _ENCODED_VALUE if match["sign"].startswith("%") else _BARE_VALUE
    return pattern.match(text, start).end()  # type: ignore[union-attr] # always matches, possibly nothing


def _find_quoted_end(text: str, opening: re.Match[str]) -> int:
    slashes, quote = opening.groups()
    # A nested quote has backslashes; its closing quote has as many.
    pattern, position = _compile_closing_quote(min(len(slashes), 16), quote), opening.end()
    while (closing := pattern.match(text, position) if not slashes else pattern.search(text, position)) is not None:
        position = closing.end()
        # In text that was quoted twice, as by KeyError, an escaped quote looks like a closing one.
        if _AFTER_QUOTE.match(text, position):
            return position
    return len(text)


_AFTER_QUOTE: Final = re.compile(r"[^A-Za-z0-9]|\Z")


@lru_cache(maxsize=64)
def _compile_closing_quote(slashes: int, quote: str) -> re.Pattern[str]:
    if not slashes:
        return re.compile(rf"(?:[^{quote}\\]|\\.)*+{quote}", re.DOTALL)
    return re.compile(rf"(?<!\\)\\{{{slashes}}}{quote}")


def _find_line_end(text: str, name_start: int, start: int) -> int:
    """Return the end of the header whose name is at *name_start*: that of its line, or of the quotes around it."""
    end = _REST_OF_LINE.match(text, start).end()  # type: ignore[union-attr] # always matches, possibly nothing
    quote = text[max(0, name_start - 1) : name_start]
    position = text.find(quote, start, end) if quote in ("'", '"') else -1
    return end if position < 0 else position


_BRACKET: Final = re.compile(r"[\[\](){}]|\"(?:[^\"\\]|\\.)*+\"|'(?:[^'\\]|\\.)*+'", re.DOTALL)


def _find_brackets_end(text: str, start: int) -> int:
    depth = 0
    for match in _BRACKET.finditer(text, start):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
            if depth == 0:
                return match.end()
    return len(text)


# -- in prose, and without a name -----------------------------------------------------------------

#: The authentication schemes of HTTP, with the value after them.
_SCHEMES: Final = re.compile(r"\b((?:bearer|basic)\s{1,4})([^\s,;'\"\[]\S*+)", re.IGNORECASE)
#: A secret in a sentence, such as "password is hunter2" or "token 3f9c": name in group 2, verb in 3, value in 4.
_PROSE_SECRET: Final = re.compile(
    r"(?<![\w-])(([\w-]*?(?:passwords?|passwd|passphrase|passcode|pwd|secret|token|(?:api|access|private)[ _-]key))"
    r"[\"']?\s(is\s|was\s|set\sto\s)?[\"']?)(?=\S{4})([^\s\"',;\[]++)",
    re.IGNORECASE,
)
_QUOTED_PASSWORD: Final = re.compile(
    r"(\b(?:password|passwd|passphrase|identified\s(?:with\s\S{1,40}\s)?by)\s{1,4})('[^']*+'|\"[^\"]*+\")",
    re.IGNORECASE,
)
_NETRC: Final = re.compile(
    r"(\bmachine\s\S{1,256}\s{1,8}login\s\S{1,256}\s{1,8}password\s{1,8})([^\s\[]\S*+)", re.IGNORECASE
)
_USER_OPTION: Final = re.compile(r"((?<!\S)(?:-u|--user|--proxy-user)[ =])([^\s:\[]++:\S++)")
_PASSWORD_ENDINGS: Final = ("password", "passwd", "passphrase", "passcode", "pwd")
_ORDINARY_WORD: Final = re.compile(r"[A-Za-z]?[a-z]*[.:!?)]*\Z|[A-Z_]+[.:!?)]*\Z")


def _hide_in_prose(text: str, lower: str) -> str:
    if "pass" in lower or "pw" in lower or "secret" in lower or "token" in lower or "key" in lower:
        text = _QUOTED_PASSWORD.sub(rf"\1{HIDDEN}", _NETRC.sub(rf"\1{HIDDEN}", text))
        text = _PROSE_SECRET.sub(_hide_prose_value, text)
    return text


def _hide_schemes(text: str, lower: str) -> str:
    """Hide the value after an HTTP scheme, the user of curl, and the password of an SQL statement."""
    if "bearer" in lower or "basic" in lower:
        text = _SCHEMES.sub(_hide_unusual_value, text)
    if "identified" in lower:
        text = _QUOTED_PASSWORD.sub(rf"\1{HIDDEN}", text)
    return _USER_OPTION.sub(rf"\1{HIDDEN}", text) if "-u" in lower else text


def _hide_unusual_value(match: re.Match[str]) -> str:
    return match[0] if _is_ordinary(match[2]) else f"{match[1]}{HIDDEN}"


def _hide_prose_value(match: re.Match[str]) -> str:
    """Hide the value of ``_PROSE_SECRET``, unless it is an ordinary word.

    Without a verb, a value is hidden only after the name of a password, and only if it has letters and digits.
    """
    name, verb, value = match[2], match[3], match[4]
    if _is_ordinary(value):
        return match[0]
    if not verb and not (name.lower().endswith(_PASSWORD_ENDINGS) and _is_mixed(value)):
        return match[0]
    return f"{match[1]}{HIDDEN}"


#: A longer word is not an ordinary one.
_MAX_WORD_CHARS: Final = 24


def _is_ordinary(word: str) -> bool:
    """Return whether *word* may be an ordinary word of a sentence: only letters, in the usual case."""
    return len(word) < _MAX_WORD_CHARS and _ORDINARY_WORD.match(word) is not None


def _is_mixed(word: str) -> bool:
    """Return whether *word* has letters and digits, as generated passwords do."""
    return (
        len(word) >= _MIN_KNOWN_CHARS and any(each.isdigit() for each in word) and any(each.isalpha() for each in word)
    )


_CHUNK: Final = re.compile(r"[^\s\"'<>,;()\[\]{}|]++")
_HOST: Final = re.compile(r"(?!sha\d)[\w.-]+(:\d{1,5})?(?:/|\Z)")
_ADDRESS_LABELS: Final = frozenset(_split_list("mailto sip sips xmpp acct"))


def _hide_logins(text: str) -> str:
    """Hide ``user:password`` before ``@host``."""
    return _CHUNK.sub(_hide_login, text) if "@" in text and ":" in text else text


def _hide_login(match: re.Match[str]) -> str:
    """Hide the login of one chunk; an ordinary word as its password is hidden only if the host has a port."""
    chunk = match[0]
    login, at, server = chunk.rpartition("@")
    if not at or "://" in login or len(server) > _MAX_NAME_CHARS:
        return chunk
    name, colon, password = login.partition(":")
    host = _HOST.match(server)
    if not colon or not name or not password or host is None or name.isdigit() or name.lower() in _ADDRESS_LABELS:
        return chunk
    if host[1] or not _is_ordinary(password):
        return f"{HIDDEN}@{server}"
    return chunk
