"""Regular expressions of the formats of JSON Schema: the strings that llguidance takes in JSON."""

from __future__ import annotations


def _of_days(months: str, days: str) -> str:
    return f"(?:{months})-(?:{days})"


_YEAR_DAY = "|".join((
    _of_days("01|03|05|07|08|10|12", "0[1-9]|[12][0-9]|3[01]"),
    _of_days("04|06|09|11", "0[1-9]|[12][0-9]|30"),
    _of_days("02", "0[1-9]|[12][0-9]"),
))  # fmt: skip
_DATE = f"[0-9]{{4}}-(?:{_YEAR_DAY})"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR_MINUTE})"


def _falling(units: str) -> str:
    """Durations in consecutive units: they start and end at any unit."""
    rest = ""
    found = []
    for unit in reversed(units):
        rest = f"[0-9]+{unit}(?:{rest})?" if rest else f"[0-9]+{unit}"
        found.append(rest)
    return f"(?:{'|'.join(found)})"


_CLOCK = f"T{_falling('HMS')}"
_DURATION = f"P(?:{_falling('YMD')}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"
_LETTER = "[A-Za-z0-9]"


def _ipv6() -> str:
    """Eight groups, or fewer with a double colon in place of the missing ones."""
    found = [f"(?:{_GROUP}:){{7}}{_GROUP}"]
    for after in range(8):
        most = 7 - after  # groups in front of the double colon
        before = f"(?:(?:{_GROUP}:){{0,{most - 1}}}{_GROUP})?" if most else ""
        found.append(f"{before}::" + (f"(?:{_GROUP}:){{{after - 1}}}{_GROUP}" if after else ""))
    return f"(?:{'|'.join(found)})"


_IPV6 = _ipv6()
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_DOMAIN = rf"{_LETTER}(?:[A-Za-z0-9-]*{_LETTER})?(?:\.{_LETTER}(?:[A-Za-z0-9-]*{_LETTER})?)*"
_LABEL = f"{_LETTER}(?:[A-Za-z0-9-]{{0,61}}{_LETTER})?"


def _uri_characters(more: str) -> str:
    """RFC 3986's unreserved characters, sub-delimiters and escapes, and more."""
    return rf"(?:[A-Za-z0-9._~!$&'()*+,;={more}-]|%{_HEX}{{2}})"


_IN_PATH = _uri_characters(":@")
_HOST = rf"(?:\[(?:{_IPV6}|v{_HEX}+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]|{_uri_characters('')}*)"
_AUTHORITY = f"(?:{_uri_characters(':')}*@)?{_HOST}(?::[0-9]*)?"
_BEHIND_SCHEME = f"//{_AUTHORITY}(?:/{_IN_PATH}*)*|/?(?:{_IN_PATH}+(?:/{_IN_PATH}*)*)?"
_REST = f"{_uri_characters(':@/?')}*"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_DOMAIN}|\[{_IPV4}\])",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_BEHIND_SCHEME})(?:\?{_REST})?(?:#{_REST})?",
}
