"""Request JSON without the object tree that nobody needs: strict parse, views, canonical text, output.

`parse` validates the whole body once (RFC 8259, UTF-8, at most 256 nested containers) and gives the root `Node`. A
node is a view: strings are decoded, numbers converted and objects searched when asked for. Whatever is not asked for
stays a span of the body.

    root = parse(body).as_object()
    model = root.get_str("model", "default")              # null counts as absent
    for message in root["messages"].as_array():           # JSONError if absent
        role = message["role"].as_str()                   # Expected `str`, got `int` - at `$.messages[2].role`
        schema = tool["function"].canonical()
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, final, overload

from typing_extensions import Buffer

T = TypeVar("T")
Kind = Literal["object", "array", "str", "int", "float", "bool", "null"]

MAX_DEPTH: int
"""Nested containers that a text may have: 256."""

class JSONError(ValueError):
    """The text is not JSON, or a value is not what was expected there.

    `message` is the fact without its place, `path` the place in the value (`$.messages[2].role`), `offset` the byte in
    the body. `str()` has all of it: ``JSON is malformed: invalid escape in a string, at byte 61 (`$.a[0]`)`` for
    syntax errors (`syntax` is True), ``Expected `str`, got `int` - at `$.messages[2].role` `` for the others.
    """

    message: str
    path: str
    offset: int
    syntax: bool
    def __init__(self, message: str, path: str = "$", offset: int = 0, syntax: bool = False) -> None: ...
    @property
    def param(self) -> str | None:
        """The path as error objects of the API show it: `messages[2].role`, None for the root."""

@final
class Node:
    """A value in a parsed body. Immutable, always true; keeps the body alive. Made by `parse` only."""

    @property
    def kind(self) -> Kind:
        """A number is "int" when it has neither fraction nor exponent."""
    @property
    def is_null(self) -> bool: ...
    @property
    def path(self) -> str:
        """`$.messages[2].role`; a name that is not an identifier is written `$["a b"]`, and cut at 64 characters."""
    @property
    def start(self) -> int:
        """Offset of the value's first byte in the body."""
    @property
    def end(self) -> int:
        """Offset after the value's last byte."""
    @property
    def raw(self) -> bytes:
        """The value's own bytes in the body, unchanged."""
    @property
    def steps(self) -> int:
        """Work of the parse of the whole body: tokens plus blocks of 64 string bytes. For tests of linearity."""

    # Objects. Of duplicate members the last one counts.
    def __len__(self) -> int:
        """Members of an object (duplicates counted) or elements of an array. Raises JSONError for other kinds."""
    def __bool__(self) -> Literal[True]: ...
    def __contains__(self, name: str) -> bool:
        """Is there such a member, even null? False if this is no object."""
    @overload
    def __getitem__(self, key: str) -> Node:
        """The member, null included. Raises JSONError if it is missing or this is no object."""
    @overload
    def __getitem__(self, key: int) -> Node:
        """The element, counted from the end if negative. Raises IndexError; JSONError if this is no array."""
    def get(self, name: str) -> Node | None:
        """The member, None if it is absent or null. Raises JSONError if this is no object."""
    def keys(self) -> list[str]:
        """Distinct member names in order of first appearance."""
    def items(self) -> list[tuple[str, Node]]:
        """Distinct member names in order of first appearance, each with its last value."""
    def texts(self) -> list[tuple[str, Kind, str]]:
        """`items`, each value as its kind and its text: a string decoded, everything else minified."""
    def get_object(self, name: str) -> Node | None: ...
    def get_array(self, name: str) -> Node | None: ...
    @overload
    def get_str(self, name: str) -> str | None: ...
    @overload
    def get_str(self, name: str, default: str) -> str: ...
    @overload
    def get_bool(self, name: str) -> bool | None: ...
    @overload
    def get_bool(self, name: str, default: bool) -> bool: ...
    @overload
    def get_int(self, name: str, default: None = None, lo: int | None = None, hi: int | None = None) -> int | None: ...
    @overload
    def get_int(self, name: str, default: int, lo: int | None = None, hi: int | None = None) -> int: ...
    @overload
    def get_float(
        self, name: str, default: None = None, lo: float | None = None, hi: float | None = None
    ) -> float | None: ...
    @overload
    def get_float(self, name: str, default: float, lo: float | None = None, hi: float | None = None) -> float: ...

    # Arrays.
    def __iter__(self) -> Iterator[Node]:
        """The elements. Raises JSONError if this is no array."""
    def ints(self, lo: int | None = None, hi: int | None = None) -> list[int]:
        """An array of integers as a list, every element checked as by `as_int`."""

    # Values. All raise JSONError when the value is of another kind.
    def as_object(self) -> Node: ...
    def as_array(self) -> Node: ...
    def as_str(self) -> str:
        """Decoded. Unpaired surrogate escapes become U+FFFD; U+0000 stays. Never holds a surrogate."""
    def as_bool(self) -> bool: ...
    def as_int(self, lo: int | None = None, hi: int | None = None) -> int:
        """A number without fraction part (`3`, `3.0`, `3e0`) of at most 64 bits, lo <= value <= hi."""
    def as_float(self, lo: float | None = None, hi: float | None = None) -> float:
        """A number as the nearest double, lo <= value <= hi; one that would be infinite is refused."""
    def loads(self) -> object:
        """The value as dict, list, str, int, float, bool or None (see `loads`)."""
    def canonical(self, drop: Sequence[str] = ()) -> str:
        """One line with ", " and ": ", members in order with duplicates, strings decoded and minimally escaped.

        What `json.dumps(value, ensure_ascii=False)` prints, but numbers keep their characters. Equal however the
        strings were spelled and spaced. `drop` names members of this object to leave out. If a number in it is not
        finite as a double, the text is returned unchanged.
        """
    def minified(self) -> str:
        """The source text without white space outside strings; numbers and escapes untouched."""
    def error(self, message: str) -> JSONError:
        """An error at this node, to raise."""

FieldKind = Literal["any", "str", "int", "float", "bool", "object", "array"]

@final
class Fields:
    """Known members of one kind of object, taken in one go: the fast way for what comes in hundreds.

        CALL = Fields(id="str", function=Fields(name="str", arguments="any"))
        MESSAGE = Fields(role="str", content="any", tool_calls=[CALL])
        for role, content, calls in MESSAGE.read_all(root["messages"]):
            for call_id, (name, arguments) in calls or ():

    A value is None if the member is absent or null, a `Node` for "object" and "array"; "any" gives str, int, float or
    bool, and a `Node` for containers. Fields inside give a tuple, in a list a list of tuples. Other members are skipped
    (the parse has validated them). The last of duplicate members counts. Immutable.
    """

    def __init__(self, **kinds: FieldKind | Fields | list[Fields]) -> None:
        """Names and kinds, 1 to 64 of them; rows have this order. Raises ValueError."""
    def read(self, node: Node) -> tuple[Any, ...]:
        """The values of one object. Raises JSONError with the path of what has another kind."""
    def read_all(self, array: Node) -> list[tuple[Any, ...]]:
        """The values of every element of an array of objects."""

class Spans:
    """What was made of values in former bodies, found by their spelling, compared in full.

    Holds at most `max_bytes`; what was not used for long goes first. Safe in threads.
    """

    def __init__(self, max_bytes: int, shortest: int = 256) -> None:
        """Values of fewer than `shortest` bytes are not kept: looking them up costs more than reading them."""
    def __len__(self) -> int: ...
    def get(self, node: Node) -> Any:
        """What `put` was given for a value of the same bytes; None if it is not known."""
    def put(self, node: Node, value: object, cost: int) -> None:
        """`cost` are the bytes that the value keeps alive beside the spelling."""
    def each(self, array: Node, make: Callable[[Node], T], weight: int) -> list[T]:
        """What `make` makes of each element, for those that are known without a call; it must not give None.

        A value keeps `weight` times as many bytes alive as its spelling has. Raises JSONError if this is no array.
        """

@final
class Texts(Spans):
    """Decodes strings; long ones that it has seen before, in whatever body, are the same object again.

    So their hashes are known and comparing them costs nothing, by which other caches find what they made of them.
    """

    def read(self, node: Node) -> str:
        """As `node.as_str()`. Raises JSONError if it is no string."""

@final
class Bodies:
    """Parses bodies, of which those of one conversation begin like the one before: only what follows is scanned.

    What `Spans` made of values in the common beginning is found again without a look at their bytes. Holds at most
    `max_bytes`, of 64 bodies at most; the latest stay, and one that went on gives way. Safe in threads.
    """

    def __init__(self, max_bytes: int, shortest: int = 16384) -> None:
        """Bodies of fewer than `shortest` bytes are parsed and forgotten."""
    def __len__(self) -> int: ...
    @property
    def bytes_held(self) -> int:
        """At most: bodies, tapes, and what was made of them."""
    def parse(self, body: bytes) -> Node:
        """As the function."""

def parse(body: Buffer) -> Node:
    """The root of a body, which must be one strict JSON text of at most 2**30 - 1 bytes. Raises JSONError.

    Takes memory of at most 16/3 times the body. Bytes are kept by reference; other buffers are copied.
    """

def loads(data: Buffer | str) -> object:
    """The value as Python objects. Of duplicate members the last counts. Raises JSONError (also when a number is not
    finite as a double or has more digits than `sys.get_int_max_str_digits` allows)."""

def dumps(value: object) -> bytes:
    """Compact UTF-8 JSON of dict (str keys), list, tuple, str, int, float, bool, None and `Node` (minified).

    Surrogates become as in `escape`. Raises JSONError with the path for any other type, for numbers that are not
    finite and for more than 256 nested containers.
    """

def canonical(data: Buffer | str) -> str:
    """`parse(data).canonical()`. Raises JSONError."""

def minify(data: Buffer | str) -> str:
    """`parse(data).minified()`. Raises JSONError."""

def escape(text: str) -> bytes:
    r"""The inside of a JSON string in UTF-8: `\"` `\\` `\n` `\r` `\t`, other code points below 0x20 as `\u00xx`.

    A pair of surrogates becomes its character, an unpaired one U+FFFD.
    """

def sse_chunk(head: bytes, delta: str, tail: bytes) -> bytes:
    """`head + escape(delta) + tail` in one allocation: a stream event from its two constant parts."""

def use_isa(name: str) -> str:
    """Chooses "scalar", "sse2", "avx2", "avx512" or "auto" (the best that the CPU has); returns what was in use.

    For tests; the results are the same. Raises ValueError for one that this CPU lacks.
    """
