"""Run a test in one process and the tested program in another; they exchange copies of plain values.

`driver` sends the text of this module into the sandbox, so it imports only the standard library. The program runs in a
child process that never sees the test. When the test calls `f(a)`, the child receives a copy of `a` and returns a copy
of the result. Everything else in a test runs in the parent: comparisons, reference solutions, random numbers,
`math.isclose`. A program that replaces builtins, sets a trace function or searches memory therefore affects only
itself. An object without a plain value, such as an instance of a class, stays in its process, and the other process
gets a `Remote` instead.
"""

import builtins
import contextlib
import copy
import ctypes
import importlib
import io
import json
import operator
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

PR_SET_DUMPABLE = 4  # prctl(2): if 0, other processes of the user can read neither our memory nor our open files
SCALARS = (type(None), bool, int, float, str)
IMMUTABLE = (int, float, str, bytes, tuple)
MUTABLE = (list, dict, set)
COLLECTIONS: dict[str, Callable[[Iterable[Any]], Any]]
COLLECTIONS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
REBUILT: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.bytes": lambda value: (value.decode("latin-1"), "latin-1"),
    "builtins.bytearray": lambda value: (value.decode("latin-1"), "latin-1"),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "decimal.Decimal": lambda value: (str(value),),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.defaultdict": lambda value: (value.default_factory, dict(value)),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
    "numpy.array": lambda value: (value.tolist(), str(value.dtype)),
}
"""Type -> the arguments from which the other process builds an equal value."""
SHARED = [
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "numpy",
    "operator",
    "random",
    "re",
    "typing",
]
"""Modules that both processes import. The test uses its own copies, which the program cannot change."""
CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
RUNNING = (types.GeneratorType, types.CoroutineType, types.FrameType, types.TracebackType)
"""Objects of a test with attributes that could lead to its variables."""
UNARY = ("abs", "bool", "float", "format", "hash", "int", "iter", "len", "next", "repr", "reversed", "round", "str")
ATTRIBUTES = ("getattr", "setattr", "hasattr")
OPERATORS = ("contains", "getitem", "setitem", "delitem", "neg", "pos", "eq", "lt", "le", "gt", "ge")
ARITHMETIC = {name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul")}
ARITHMETIC |= {
    name: getattr(operator, f"{name}_", None) or getattr(operator, name) for name in ("and", "or", "xor", "pow")
}


class Remote:
    """Proxy for an object in the other process, where its methods run. `base`: builtin type that its class extends."""

    def __init__(self, link: "Link", number: int, base: Any) -> None:
        vars(self).update(_link=link, _number=number, _base=base)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        """Compare content with a plain value, if the class extends a builtin type. Two objects compare remotely."""
        if isinstance(other, Remote):
            return self is other or bool(self._link.ask("eq", self, other))
        return self._base is not None and bool(self._link.ask("content", self) == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, item: object) -> bool:
        if self._link.ask("hasattr", self, "__iter__"):
            return any(item is one or item == one for one in iter(self))
        return bool(self._link.ask("contains", self, item))

    def __instancecheck__(self, one: object) -> bool:
        return isinstance(one, Remote) and bool(self._link.ask("isinstance", one, self))

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *problem: object) -> bool:
        return bool(self.__getattr__("__exit__")(None, None, None))

    def __deepcopy__(self, _: object) -> Any:
        return self._link.ask("deepcopy", self)


class RemoteCallable(Remote):
    """A function, class or method of the other process."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._link.ask("call", self, *args, **options)


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._link.ask(name, self, *args)


def _order(name: str) -> Callable[..., Any]:
    """Compare two objects by their own rule, and an object's content with a plain value."""

    def compare(self: Any, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._link.ask(name, self, other)
        return NotImplemented if self._base is None else getattr(operator, name)(self._link.ask("content", self), other)

    return compare


def _arithmetic(name: str, reflected: bool) -> Callable[..., Any]:
    """Calculate with another object. A number minus an object is not a number, or it could equal every number."""

    def calculate(self: Any, other: Any) -> Any:
        found = self._link.ask(name, *((other, self) if reflected else (self, other)))
        if isinstance(other, (int, float, complex)) and isinstance(found, (int, float, complex)):
            return NotImplemented
        return found

    return calculate


for _name in (*UNARY, "getitem", "setitem", "delitem", "neg", "pos"):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _order(_name))
for _name in ARITHMETIC:
    setattr(Remote, f"__{_name}__", _arithmetic(_name, False))
    setattr(Remote, f"__r{_name}__", _arithmetic(_name, True))


class ProgramExit(SystemExit):
    """The program called `sys.exit`."""


class ProgramEnded(BaseException):
    """The program's process has ended. Derives from BaseException so that tests do not catch it."""


class Link:
    """Sends requests to the other process and answers its requests. A request names a function of `FUNCTIONS`."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reader = os.fdopen(reading, "rb")
        self._writer = os.fdopen(writing, "wb")
        self._lock = threading.RLock()  # for programs with threads
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self._classes: dict[Any, int] = {}
        self._sent: dict[str, Any] = {}
        self._changed: dict[int, tuple[Any, Any]] = {}
        self._unread: set[int] = set()
        self.main = types.ModuleType("__main__")
        self.names = vars(self.main)
        self.wanted: list[str] = []  # variables that the other process needs
        self.missing: list[str] = []  # variables that this process needs
        sys.modules["__main__"] = self.main

    def ask(self, function: str, *args: Any, **options: Any) -> Any:
        """Call a function of `FUNCTIONS` in the other process, and raise any exception that it raises."""
        with self._lock:
            self._send({"ask": [function, [self.encode(one) for one in args], self.encode(options), self._news()]})
            while "ask" in (message := self._receive()):
                self._send(self._answer(*message["ask"]))
        self._take(message["news"])
        if "raised" in message:
            raise self.decode(message["raised"])
        if message["printed"] and sys.stdout is not sys.__stdout__:  # the test reads what the program prints
            sys.stdout.write(message["printed"])
        kept = [id(one) in self._unread and message["value"] is not None for one in args]
        self._unread.clear()
        for number, after in message["changed"]:
            if not kept[number]:
                self._change(args[number], self.decode(after))
        same = message["same"]
        return self.decode(message["value"]) if same is None or kept[same] else args[same]

    def serve(self) -> None:
        """Answer requests until the other process closes its end."""
        with contextlib.suppress(ProgramEnded):
            while True:
                self._send(self._answer(*self._receive()["ask"]))

    def unread(self, value: Any) -> Any:
        """Mark a value whose original stays unchanged if the next function changes its copy and returns something."""
        self._unread.add(id(value))
        return value

    def before(self, value: Any) -> Any:
        """The value from before the program last changed it."""
        changed, earlier = self._changed.get(id(value), (self, None))
        return earlier if changed is value else value

    def encode(self, value: Any) -> Any:
        """Encode a value for JSON: scalars and lists of scalars are unchanged, others become {kind: content}."""
        kind = type(value)
        if kind in SCALARS or (kind is list and all(type(one) in SCALARS for one in value)):
            return value
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind in (list, tuple, set, frozenset):
            return {kind.__name__: [self.encode(one) for one in value]}
        if kind in (type({}.keys()), type({}.items())):
            return {"set": [self.encode(one) for one in value]}
        if kind is dict:
            return {"dict": [[self.encode(key), self.encode(one)] for key, one in value.items()]}
        if hasattr(kind, "tolist") and hasattr(kind, "dtype"):
            name = "numpy.array"
            if not value.shape:
                return self.encode(value.tolist())
        if name in REBUILT:
            return {"new": [name, self.encode(list(REBUILT[name](value)))]}
        if issubclass(kind, Remote):
            return {"yours": value._number}
        if issubclass(kind, BaseException):
            return {"error": [self.encode(kind), self.encode(list(value.args)), self.encode(vars(value))]}
        made = value if issubclass(kind, type) else kind
        if made in self._classes:
            return {"yours": self._classes[made]}
        if issubclass(kind, types.ModuleType) and value.__name__ in SHARED:
            return {"known": [value.__name__, ""]}
        place = str(getattr(value, "__module__", "")), str(getattr(value, "__name__", ""))
        if (place[0] in SHARED or (place[0] == "builtins" and issubclass(kind, type))) and known(*place) is value:
            return {"known": place}
        return {"mine": self._describe(value)}

    def decode(self, written: Any) -> Any:
        """Decode a value that the other process has encoded."""
        if isinstance(written, list):
            return list(written)
        if not isinstance(written, dict):
            return written
        ((kind, content),) = written.items()
        if kind in COLLECTIONS:
            return COLLECTIONS[kind](self.decode(one) for one in content)
        match kind:
            case "dict":
                return {self.decode(key): self.decode(one) for key, one in content}
            case "yours":
                return self._objects[content]
            case "known":
                return self._known(*content)
            case "new" if content[0] in REBUILT:
                return known(*content[0].rpartition(".")[::2])(*self.decode(content[1]))
            case "error":
                made, args, state = (self.decode(one) for one in content)
                error = made.__new__(made, *args)
                vars(error).update(state)
                return error
        number = content["number"]
        if number not in self._remotes:
            self._remotes[number] = self._stand_in(content)
        return self._remotes[number]

    def _describe(self, value: Any) -> dict[str, Any]:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)  # kept, so that no other object gets its id
        found = {"number": number, "kind": "callable" if callable(value) else "object"}
        found["name"] = getattr(value, "__name__", type(value).__name__)
        if isinstance(value, type) and issubclass(value, BaseException):
            return found | {"kind": "error", "module": value.__module__, "base": self.encode(value.__base__)}
        if isinstance(value, types.CoroutineType):
            return found | {"kind": "coroutine"}
        base: Any
        for base in IMMUTABLE:
            if isinstance(value, base):
                plain = self.encode(base.__getnewargs__(value)[0])
                return found | {"kind": "value", "base": self.encode(base), "plain": plain}
        bases = [self.encode(base) for base in MUTABLE if isinstance(value, base)]
        return found | {"base": bases[0] if bases else None}

    def _stand_in(self, content: Mapping[str, Any]) -> Any:
        number, kind, name = content["number"], content["kind"], content["name"]
        base = self.decode(content.get("base"))
        remote = (RemoteCallable if kind == "callable" else Remote)(self, number, base)
        if kind == "coroutine":
            return self._await(remote)
        if kind not in ("error", "value"):
            return remote
        if kind == "error" and content["module"].partition(".")[0] in sys.stdlib_module_names - {"unittest"}:
            found = getattr(sys.modules.get(content["module"]), name, None)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        made = type(name, (base,), {} if kind == "error" else {"__getattr__": lambda _, part: getattr(remote, part)})
        self._classes[made] = number
        return made if kind == "error" else made(self.decode(content["plain"]))

    async def _await(self, coroutine: Remote) -> Any:
        return self.ask("await", coroutine)

    def _answer(self, function: str, given: list[Any], options: Any, news: Mapping[str, Any]) -> dict[str, Any]:
        """Run a request of the other process and encode its result."""
        self._take(news)
        try:
            args = [self.decode(one) for one in given]
            value, printed = self._run(function, given, args, self.decode(options))
            answer = {"value": self.encode(value), "printed": printed}
            places = [number for number, one in enumerate(args) if is_copied(given[number]) and is_mutable(one)]
            after = [(number, self.encode(args[number])) for number in places]
            answer["changed"] = [(number, one) for number, one in after if one != given[number]]
            answer["same"] = next((number for number in places if args[number] is value), None)
        except ProgramEnded:
            raise
        except BaseException as error:
            answer = {"raised": self.encode(error)}
        return answer | {"news": self._news()}

    def _run(self, function: str, given: list[Any], args: list[Any], options: dict[str, Any]) -> tuple[Any, str]:
        raise NotImplementedError

    def _known(self, module: str, name: str) -> Any:
        found = known(module, name) if module in (*SHARED, "builtins") and name[:1] != "_" else None
        return found if module != "builtins" or isinstance(found, type) else None

    def _change(self, value: Any, after: Any) -> None:
        """Set the content of `value` to `after`, because the program has changed its copy."""
        self._changed[id(value)] = value, self.decode(self.encode(value))
        change(value, after)

    def _news(self) -> dict[str, Any]:
        """Variables that the other process needs and whose present state it does not have yet."""
        found = {name: self.encode(self.names[name]) for name in self.wanted if self._is_open(name)}
        new = {name: one for name, one in found.items() if name not in self._sent or self._sent[name] != one}
        self._sent |= new
        return new

    def _is_open(self, name: str) -> bool:
        return name in self.names

    def _take(self, news: Mapping[str, Any]) -> None:
        self.names.update((name, self.decode(one)) for name, one in news.items() if name in self.missing)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except BrokenPipeError:
            raise ProgramEnded from None

    def _receive(self) -> Any:
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise ProgramEnded("the program ended before the test did")
        return json.loads(line)


class ProgramSide(Link):
    """In the child: runs the test's calls, and sends back printed output."""

    def _run(self, function: str, given: list[Any], args: list[Any], options: dict[str, Any]) -> tuple[Any, str]:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            value = FUNCTIONS[function](*args, **options) if function != "start" else self._start(*args)
        return value, printed.getvalue()

    def _start(self, used: list[str], free: list[str], program: str) -> Any:
        """Run the program. Returns the variables that the test uses, and the names that the program does not define.

        It runs as a module that a test imports, so code below `if __name__ == "__main__":` is skipped; that code
        expects input.
        """
        code = compile(program, "main.py", "exec")
        self.names["__name__"], sys.modules["main"] = "main", self.main
        try:
            exec(code, self.names)
        except SystemExit:
            os._exit(0)  # before the test has run: no pass
        self.wanted = free
        self.missing = [name for name in names_in(code) if name not in self.names and not hasattr(builtins, name)]
        return {name: self.names[name] for name in used if name in self.names}, self.missing


class TestSide(Link):
    """In the parent: gives the program access to objects that the test passes to it, and to plain data classes."""

    def _run(self, function: str, given: list[Any], args: list[Any], options: dict[str, Any]) -> tuple[Any, str]:
        if function == "input":
            return f"{input()}\n", ""
        passed = isinstance(given[0], dict) and "yours" in given[0]
        private = function in ATTRIBUTES and (isinstance(args[0], CLOSED + RUNNING) or str(args[1]).startswith("_"))
        if private or not passed:
            raise AttributeError(f"{function}: the test has not passed this object")
        return FUNCTIONS[function](*args, **options), ""

    def _is_open(self, name: str) -> bool:
        found = self.names.get(name)
        return isinstance(found, type) and all(one[:2] == "__" for one in vars(found) if callable(getattr(found, one)))

    def _known(self, module: str, name: str) -> Any:
        found = super()._known(module, name)
        return ProgramExit if found is SystemExit else found


class ProgramInput(io.TextIOBase):
    """Standard input of the program: lines from the test's `input`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def readline(self, *_: Any) -> str:  # type: ignore[override]
        """The next line, or nothing at the end."""
        try:
            line: str = self._link.ask("input")
        except EOFError:
            return ""
        return line

    def read(self, *_: Any) -> str:  # type: ignore[override]
        """All remaining lines."""
        return "".join(iter(self.readline, ""))


class Stub:
    """A program that returns the same value for every call."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> "Stub":
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(self._value)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return object() if self._value is object else self._value


def known(module: str, name: str) -> Any:
    """A module, or an object in it."""
    found = importlib.import_module(module)
    return getattr(found, name, None) if name else found


def names_in(code: types.CodeType) -> list[str]:
    """Names of global variables in a program and its functions, including names of attributes."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return sorted({*code.co_names, *(name for one in inner for name in names_in(one))})


def is_copied(written: Any) -> bool:
    """Whether an encoded argument is a container."""
    return isinstance(written, list) or (isinstance(written, dict) and not written.keys() & {"yours", "mine"})


def is_mutable(value: Any) -> bool:
    """Whether a value is a container that `change` can update."""
    return hasattr(value, "clear") and (hasattr(value, "extend") or hasattr(value, "update"))


def change(value: Any, after: Any) -> None:
    """Copy the content of a container into another; in lists of equal length, nested containers keep their identity."""
    if isinstance(value, list) and len(value) == len(after):
        for number, (one, new) in enumerate(zip(value, after)):
            if is_mutable(one) and type(one) is type(new):
                change(one, new)
            else:
                value[number] = new
        return
    value.clear()
    (value.extend if hasattr(value, "extend") else value.update)(after)


def content(value: Any) -> Any:
    """The content of an instance of a class that extends list, dict or set."""
    return next(base for base in MUTABLE if isinstance(value, base)).copy(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in (*UNARY, *ATTRIBUTES, "isinstance")},
    **{name: getattr(operator, name) for name in OPERATORS},
    **ARITHMETIC,
    "await": lambda coroutine: importlib.import_module("asyncio").run(coroutine),
    "call": lambda function, *args, **options: function(*args, **options),
    "content": content,
    "deepcopy": copy.deepcopy,
}


def passes(code: str, names: dict[str, Any]) -> bool:
    """Run a test. True if nothing fails, including in unittest, which catches failures."""
    results = list[Any]()
    if "unittest" in code:
        import unittest

        begin = unittest.TestResult.__init__
        unittest.TestResult.__init__ = lambda self, *args: (results.append(self), begin(self, *args))[1]  # type: ignore
    try:
        exec(compile(code, "test.py", "exec"), names)
    except SystemExit as end:
        if isinstance(end, ProgramExit) or end.code:
            return False
    except BaseException:
        traceback.print_exc()
        return False
    return all(result.wasSuccessful() for result in results)


def run(program: str) -> None:
    """Start the program's process, read the test, and write the secret word if it passes."""
    down, up = os.pipe(), os.pipe()
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    child = os.fork()
    if child == 0:
        os.close(down[1])
        os.close(up[0])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # keep the parent's output separate
        side = ProgramSide(down[0], up[1])
        sys.stdin = ProgramInput(side)
        sys.setrecursionlimit(sys.getrecursionlimit() + 50)  # for the functions of this module
        side.serve()
        os._exit(0)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    test = json.loads(sys.stdin.read())
    os.close(down[0])
    os.close(up[1])
    link = TestSide(up[0], down[1])
    passed = False
    try:
        found, link.wanted = link.ask("start", test["used"], test["free"], program)
        link.names.update(found, _rlhf_unread=link.unread, _rlhf_before=link.before)
        link.missing = test["free"]
        passed = passes(test["code"], link.names)
    except BaseException:
        traceback.print_exc()
    os.kill(child, signal.SIGKILL)
    _end(passed, test["word"])


def run_without_program() -> None:
    """Read a test, and write the secret word if it passes for any return value, which means that it checks nothing."""
    import ast

    test = json.loads(sys.stdin.read())
    values: list[Any] = [object, None]
    for node in ast.walk(ast.parse(test["code"])):
        with contextlib.suppress(ValueError, TypeError, SyntaxError):
            values.append(ast.literal_eval(node))  # type: ignore[arg-type]
    for value in values:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        vars(main).update(_rlhf_unread=lambda one: one, _rlhf_before=lambda one: one)
        vars(main).update((name, Stub(value)) for name in test["used"])
        if not passes(test["code"], vars(main)):
            _end(False, test["word"])
    _end(True, test["word"])


def _end(passed: bool, word: str) -> None:
    with contextlib.suppress(AttributeError):
        sys.__stdout__.write(f"\n{word}" if passed else "")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
    sys.stderr.flush()
    os._exit(0 if passed else 1)
