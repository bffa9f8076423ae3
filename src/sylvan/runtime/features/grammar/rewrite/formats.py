r"""Known string formats, and regexes for those that libraries lack or enforce loosely.

The regexes follow the standards that JSON Schema names, without look-around. If a
standard is not regular, or needs Unicode tables, they allow a subset: for `regex`,
groups nested two deep; for `idn-hostname`, letters and digits of scripts without special rules.
"""

from __future__ import annotations

from collections.abc import Mapping

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PERCENT = "%[0-9A-Fa-f]{2}"
_PLAIN = r"A-Za-z0-9._~\-"
_SUB = r"!$&'()*+,;="
_MORE = (
    "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U0001fffd\U00020000-\U0002fffd"  # RFC 3987
)
_LETTERS = "a-z0-9\u00e0-\u00f6\u00f8-\u00ff\u0430-\u044f\u4e00-\u9fa5\uac00-\ud7a3"
_ASCII_LABEL = "[A-Za-z0-9]{1,31}(?:-[A-Za-z0-9]{1,31})?"
_IDN_LABEL = (
    f"(?:{_ASCII_LABEL}|[{_LETTERS}]{{1,6}}(?:-[{_LETTERS}]{{1,6}})?)"  # 63 octets when encoded
)
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-" + _MORE + "]+"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"


def _reference(more: str, *, absolute: bool) -> str:
    """Return a URI reference (RFC 3986, section 4.1); `more` adds characters beyond ASCII."""
    plain = _PLAIN + more
    character = f"(?:[{plain}{_SUB}:@]|{_PERCENT})"
    no_colon = f"(?:[{plain}{_SUB}@]|{_PERCENT})"
    ipv4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
    hexes = "[0-9A-Fa-f]{1,4}"
    ipv6 = f"(?:(?:{hexes}:){{7}}{hexes}|::(?:{hexes}(?::{hexes}){{0,5}})?|(?:{hexes}:){{1,6}}:)"
    host = rf"(?:\[{ipv6}\]|{ipv4}|(?:[{plain}{_SUB}]|{_PERCENT})*)"
    authority = f"(?:(?:[{plain}{_SUB}:]|{_PERCENT})*@)?{host}(?::[0-9]*)?"
    path = f"(?:/{character}*)*"
    rooted = f"/(?:{character}+{path})?"
    tail = rf"(?:\?(?:{character}|[/?])*)?(?:#(?:{character}|[/?])*)?"
    scheme = r"[A-Za-z][A-Za-z0-9+.\-]*:"
    full = f"{scheme}(?://{authority}{path}|{rooted}|{character}+{path})?"
    if absolute:
        return f"^(?:{full}){tail}$"
    relative = f"(?://{authority}{path}|{rooted}|{no_colon}+{path})?"
    return f"^(?:{full}|{relative}){tail}$"


def _template() -> str:
    """A URI template (RFC 6570, section 2)."""
    literal = f"(?:[A-Za-z0-9!#$&()*+,\\-./:;=?@\\[\\]_~{_MORE}]|{_PERCENT})"
    character = f"(?:[A-Za-z0-9_]|{_PERCENT})"
    variable = rf"{character}(?:\.?{character})*(?::[1-9][0-9]{{0,3}}|\*)?"
    expression = rf"\{{[+#./;?&]?{variable}(?:,{variable})*\}}"
    return f"^(?:{literal}|{expression})*$"


def _regex() -> str:
    """A regex of ECMA-262 with groups of at most two levels."""
    letter = r"[A-Za-z0-9 _:@,=%~/<>!&;\"'#\-]"
    members = r"\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9 _.,:;@#]|\\[dDwWsS.\-/\[\]\\^])+\]"
    count = r"(?:[*+?]\??|\{[0-9]{1,2}(?:,)?\}\??)?"
    atom = rf"(?:{letter}|\.|\\[dDwWsSnrtfv.\-/()\[\]{{}}|*+?^$\\]|{members}){count}"
    inner = rf"\((?:\?:)?(?:{atom})*(?:\|(?:{atom})*)*\){count}"
    outer = rf"\((?:\?:)?(?:{atom}|{inner})*(?:\|(?:{atom}|{inner})*)*\){count}"
    body = f"(?:{atom}|{outer})*"
    return rf"^\^?{body}(?:\|{body})*\$?$"


_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DAY = (  # day of a month; 29 February is valid in every year
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_DATE = f"[0-9]{{4}}-{_DAY}"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|(?:\\+|-){_HOUR})"


PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": f"^{_LABEL}(?:\\.{_LABEL})*$",
    "idn-email": f"^{_ATOM}(?:\\.{_ATOM})*@{_IDN_LABEL}(?:\\.{_IDN_LABEL})*$",
    "idn-hostname": f"^{_IDN_LABEL}(?:\\.{_IDN_LABEL})*$",
    "ipv4": f"^{_OCTET}(?:\\.{_OCTET}){{3}}$",
    "iri": _reference(_MORE, absolute=True),
    "iri-reference": _reference(_MORE, absolute=False),
    "json-pointer": f"^{_POINTER}$",
    "regex": _regex(),
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "time": f"^{_TIME}$",
    "uri-reference": _reference("", absolute=False),
    "uri-template": _template(),
}
"""Regexes by format."""

KNOWN = frozenset(
    [
        "duration",
        "email",
        "ipv6",
        "uri",
        "uuid",
        *PATTERNS,
    ]
)
"""Formats of JSON Schema; other formats are annotations."""
