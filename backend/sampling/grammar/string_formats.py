r"""Formats of strings as patterns without anchors: texts that readers in today's libraries take.

None has a "<", nor a slash other than as `\x2f`, which ends a terminal. They follow RFC 3339, RFC
3986, RFC 3987, RFC 4291, RFC 5321, RFC 6570, RFC 6901 and ISO 8601, but for leap seconds, which few
readers know, quoted mailboxes, host names in other scripts, and the total length of a host name.
Networks, and UUIDs of a version, are pydantic's.
"""

from collections.abc import Mapping
from typing import Any

_LONG = r"(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT = r"(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_FEBRUARY = r"02-(0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = rf"([0-9]{{4}}-({_LONG}|{_SHORT}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_ZONE = r"([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?{_ZONE}"
_HOURS = r"T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = r"([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_HEX = "[0-9a-fA-F]"
_GROUP = rf"{_HEX}{{1,4}}"
_LAST = rf"({_GROUP}:{_GROUP}|{_IPV4})"


def _shortened(before: int, after: str) -> str:
    """Return an address with `::` after up to so many groups."""
    return rf"(({_GROUP}:){{0,{before - 1}}}{_GROUP})?::{after}" if before else f"::{after}"


_IPV6 = "|".join(
    (
        rf"({_GROUP}:){{6}}{_LAST}",
        *(_shortened(5 - left, rf"({_GROUP}:){{{left}}}{_LAST}") for left in range(5, -1, -1)),
        *(_shortened(6, _GROUP), _shortened(7, "")),
    )
)
_PREFIX_4, _PREFIX_6 = r"(3[0-2]|[12]?[0-9])", r"(12[0-8]|1[01][0-9]|[1-9]?[0-9])"
_INTERFACE_4, _INTERFACE_6 = rf"{_IPV4}(\x2f{_PREFIX_4})?", rf"({_IPV6})(\x2f{_PREFIX_6})?"
# The bits after the prefix are 0, so it ends with a number; it may also be the whole address.
_NETWORK_4 = (
    rf"{_BYTE}\.0\.0\.0\x2f8|{_BYTE}\.{_BYTE}\.0\.0\x2f16|{_BYTE}(\.{_BYTE}){{2}}\.0\x2f24"
    rf"|{_IPV4}(\x2f32)?"
)
_NETWORK_6 = rf"({_IPV6})(\x2f128)?|{_GROUP}(:{_GROUP}){{0,3}}::\x2f64"
_ATOM = r"[A-Za-z0-9!#$%&'*+\x2f=?^_`{|}~-]+"
_ESCAPED = rf"%{_HEX}{{2}}"
# Outside ASCII, but for those that are private, or no characters.
_FOREIGN = r"\u{a0}-\u{d7ff}\u{f900}-\u{fdcf}\u{fdf0}-\u{ffef}\u{10000}-\u{1fffd}"
_FOREIGN_ATOM = rf"[{_FOREIGN}A-Za-z0-9!#$%&'*+\x2f=?^_`{{|}}~-]+"
_POINTER = r"(\x2f([^~\x2f\x3c]|~[01])*)*"
_VARIABLE = rf"([A-Za-z0-9_]|{_ESCAPED})(\.?([A-Za-z0-9_]|{_ESCAPED}))*(:[1-9][0-9]{{0,3}}|\*)?"
_TEXT = rf"[{_FOREIGN}!#$&(-;=?-\[\]_a-z~]|{_ESCAPED}"


def _addresses(foreign: str = "") -> tuple[str, str]:
    """Return the patterns of URIs and of references, which may have further characters."""
    in_name = rf"A-Za-z0-9._~!$&'()*+,;=\-{foreign}"
    char, rest = rf"([{in_name}:@]|{_ESCAPED})", rf"([{in_name}:@\x2f?]|{_ESCAPED})*"
    segments, first = rf"(\x2f{char}*)*", rf"([{in_name}@]|{_ESCAPED})+"
    host = rf"(\[({_IPV6})\]|([{in_name}]|{_ESCAPED})*)"
    authority = rf"(([{in_name}:]|{_ESCAPED})*@)?{host}(:[0-9]*)?"
    rooted = rf"\x2f\x2f{authority}{segments}|\x2f({char}+{segments})?"
    end = rf"(\?{rest})?(#{rest})?"
    whole = rf"[A-Za-z][A-Za-z0-9+.-]*:({rooted}|{char}+{segments})?{end}"
    return whole, rf"{whole}|({rooted}|{first}{segments})?{end}"


_URI, _URI_REFERENCE = _addresses()
_IRI, _IRI_REFERENCE = _addresses(_FOREIGN)

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": rf"P({_DAYS}({_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@({_HOST}|\[{_IPV4}\])",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipv4interface": _INTERFACE_4,
    "ipv6interface": _INTERFACE_6,
    "ipv4network": _NETWORK_4,
    "ipv6network": _NETWORK_6,
    "ipvanyaddress": rf"{_IPV4}|{_IPV6}",
    "ipvanyinterface": rf"{_INTERFACE_4}|{_INTERFACE_6}",
    "ipvanynetwork": rf"{_NETWORK_4}|{_NETWORK_6}",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    **{
        f"uuid{version}": rf"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}"
        rf"-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
        for version in range(1, 9)
    },
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "idn-email": rf"{_FOREIGN_ATOM}(\.{_FOREIGN_ATOM})*@({_HOST}|\[{_IPV4}\])",
    "idn-hostname": _HOST,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9][0-9]*)(#|{_POINTER})",
    "uri-template": rf"({_TEXT}|\{{[+#.\x2f;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*",
}


def with_spelled_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with its format, if it is one of these, as a pattern."""
    name = schema.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        return schema
    spelled = {key: value for key, value in schema.items() if key != "format"}
    pattern = f"^({FORMATS[name]})$"
    if "pattern" not in spelled:
        return {**spelled, "pattern": pattern}
    return {**spelled, "allOf": [*spelled.get("allOf", ()), {"pattern": pattern}]}
