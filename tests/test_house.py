"""The rules of the house: sizes, which module may import which, words that stay out, docstrings, one set of pins."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAX_FILE_LINES = 500
MAX_PYTHON_FUNCTION_LINES = 60
MAX_CPP_FUNCTION_LINES = 120
MAX_LIBRARY_LINES = 9000  # what runs on a GPU
MAX_COMPANION_LINES = 2500  # the slow references, and the CPU's side of CUDA

# A module may import from its own floor and from those below it. A name stands for all that is inside it.
FLOORS = [
    ("config", "layout", "errors", "world", "rendezvous", "testing.nvfp4", "testing.formats"),
    ("abi", "device", "symm", "native", "quant"),
    ("api", "a2a", "lockstep", "arguments", "channel", "received", "route", "experts"),
    ("moe", "ops", "testing"),
    ("adapters", "demo", "report", "doctor", "trace", "__main__", ""),  # "" is `ep_a2a` itself
]


def project_files() -> list[Path]:
    """What git tracks or would; without git, all but what is built or installed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        skipped = {"build", "dist", ".venv", ".git"}
        found = [p for p in ROOT.rglob("*") if not skipped & set(p.relative_to(ROOT).parts) and p.suffix != ".pyc"]
    else:
        found = [ROOT / name for name in listed.split("\0") if name]
    return sorted(p for p in found if p.is_file() and not p.is_symlink())


FILES = project_files()
COMPANIONS = [
    p for p in FILES if p.relative_to(ROOT).match("ep_a2a/testing/*") or p.relative_to(ROOT).match("cuda/simt_*")
]
LIBRARY = [p for p in FILES if p.relative_to(ROOT).parts[0] in ("ep_a2a", "cuda") and p not in COMPANIONS]
SOURCES = [p for p in FILES if p.suffix in (".py", ".cu", ".cuh", ".h", ".cpp", ".sh", ".cmake")]
PYTHON = [p for p in FILES if p.suffix == ".py"]
CPP = [p for p in FILES if p.suffix in (".cu", ".cuh", ".h", ".cpp")]


def show(path: Path, line: int | None = None) -> str:
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line else "")


def expect_none(found: list[str], what: str) -> None:
    assert not found, "\n  ".join([f"{what}:", *found])


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_are_found() -> None:
    names = {show(p) for p in FILES}
    assert {"pyproject.toml", "ep_a2a/layout.py", "cuda/abi.h", "launch/test.sh", "tests/test_house.py"} <= names


# ---- sizes -------------------------------------------------------------------------------------------------------


def test_files_are_short() -> None:
    long = [f"{show(p)}: {num_lines(p)} lines" for p in SOURCES if num_lines(p) > MAX_FILE_LINES]
    expect_none(long, f"more than {MAX_FILE_LINES} lines")


@pytest.mark.parametrize(("files", "most"), [(LIBRARY, MAX_LIBRARY_LINES), (COMPANIONS, MAX_COMPANION_LINES)])
def test_library_is_small(files: list[Path], most: int) -> None:
    total = sum(num_lines(p) for p in files)
    print(f"{total} lines of {most}")
    assert 0 < total <= most


def test_python_functions_are_short() -> None:
    long = []
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_PYTHON_FUNCTION_LINES:
                    long.append(f"{show(path, node.lineno)} {node.name}: {lines} lines")
    expect_none(long, f"more than {MAX_PYTHON_FUNCTION_LINES} lines")


def blank_out(text: str) -> str:
    """C++ without comments, literals and preprocessor lines; every line stays a line."""
    parts = [
        r"//[^\n]*",
        r"/\*.*?\*/",
        r'R"\(.*?\)"',
        r'"(?:\\.|[^"\\\n])*"',
        r"'(?:\\.|[^'\\\n]){1,4}'",
        r"^[ \t]*#(?:\\\n|[^\n])*",
    ]
    pattern = "|".join(parts)
    return re.sub(pattern, lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def cpp_functions(text: str) -> Iterator[tuple[int, str, int]]:
    """First line, head and number of lines of every outermost braced body that follows a parameter list."""
    text = blank_out(text)
    stack: list[tuple[bool, int, str]] = []  # is it a function, its first line, its head
    head_start, line = 0, 1
    for at, char in enumerate(text):
        line += char == "\n"
        if char == "{":
            head = " ".join(text[head_start:at].split())
            is_type = re.match(r"(template\s*<.*>\s*)?(struct|class|union|enum|namespace)\b[^()]*$", head)
            is_function = bool("(" in head and not is_type and not any(f for f, _, _ in stack))
            stack.append((is_function, line, head))
        elif char == "}" and stack:
            is_function, first, head = stack.pop()
            if is_function:
                yield first, head, line - first + 1
        if char in "{};":
            head_start = at + 1


def test_cpp_functions_are_short() -> None:
    found = [(path, *function) for path in CPP for function in cpp_functions(path.read_text())]
    assert len(found) > 20, "the reader of C++ finds no functions any more"
    long = [f"{show(p, at)} {head[-60:]}: {n} lines" for p, at, head, n in found if n > MAX_CPP_FUNCTION_LINES]
    expect_none(long, f"more than {MAX_CPP_FUNCTION_LINES} lines")


def test_cpp_functions_are_measured() -> None:
    body = "  if (a) {\n    b();  // }\n  }\n"
    method = f"struct S {{\n  int f() const {{\n{body}  }}\n}};\n"
    text = f"namespace n {{\n{method}#define X {{\nint g(char c = '{{') {{\n{body}}}\n}}"
    assert [(first, lines) for first, _, lines in cpp_functions(text)] == [(3, 5), (10, 5)]


# ---- imports -----------------------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "ep_a2a").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int | None:
    """The floor that names the module or, failing that, the nearest package around it."""
    if not module:
        return len(FLOORS) - 1
    while module:
        for floor, names in enumerate(FLOORS):
            if module in names:
                return floor
        module = module.rpartition(".")[0]
    return None


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The modules of this library that a file imports, also inside functions; not those for type checkers alone."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] == "ep_a2a":
                yield node.lineno, existing_module(name)


def existing_module(dotted: str) -> str:
    """`ep_a2a.config.Config` -> `config`: the part of a dotted name that is a file or folder of the library."""
    parts = dotted.split(".")
    while len(parts) > 1:
        place = ROOT.joinpath(*parts)
        if place.is_dir() or place.with_suffix(".py").is_file():
            break
        parts.pop()
    return ".".join(parts[1:])


def test_imports_go_down() -> None:
    upward = []
    for path in PYTHON:
        if path.relative_to(ROOT).parts[0] != "ep_a2a":
            continue
        module = module_of(path)
        floor = floor_of(module)
        assert floor is not None, f"{show(path)}: give the module a floor in FLOORS"
        for line, imported in imported_modules(ast.parse(path.read_text())):
            below = floor_of(imported)
            assert below is not None, f"{show(path, line)}: {imported} has no floor in FLOORS"
            if below > floor:
                upward.append(f"{show(path, line)}: {module} (floor {floor}) imports {imported or 'ep_a2a'} ({below})")
    expect_none(upward, "imports go down only")


def test_floors_are_known() -> None:
    assert [floor_of(m) for m in ("config", "symm.local", "experts.plain", "testing.moe", "testing.nvfp4", "")] == [
        *(0, 1, 2, 3, 0, 4)
    ]
    tree = ast.parse("from ep_a2a.config import Config\nfrom ep_a2a import layout\nimport ep_a2a\nimport torch")
    assert [name for _, name in imported_modules(tree)] == ["config", "layout", ""]


# ---- words -------------------------------------------------------------------------------------------------------

# With a tilde in each, so that this file does not hold what it forbids.
FORBIDDEN = {
    what: word.replace("~", "")
    for what, word in {
        "work left to do": r"\b(TO~DO|FIX~ME|XX~X)\b",
        "a path of one machine": r"(?<![\w.}$*/])/(wo~rk|tm~p|ho~me|ro~ot)/",
        "the host of a package registry": r"\b(py~pi\.org|python~hosted\.org|debian~\.org|npm~js\.org)\b",
        "a number in a list of issues": r"\bissue~s? #?\d",
    }.items()
}


def test_forbidden_words() -> None:
    found = []
    for path in FILES:
        if path.suffix in (".png", ".svg", ".pdf"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            found += [f"{show(path, number)}: {what}" for what, word in FORBIDDEN.items() if re.search(word, line)]
    expect_none(found, "words that stay out")


@pytest.mark.parametrize("line", ["# TO~DO: later", "open('/tm~p/x')", "see iss~ue 7", "py~pi.org/simple", " /wo~rk/x"])
def test_forbidden_words_are_seen(line: str) -> None:
    assert not any(re.search(word, line) for word in FORBIDDEN.values())
    assert any(re.search(word, line.replace("~", "")) for word in FORBIDDEN.values())


# ---- docstrings --------------------------------------------------------------------------------------------------


def test_public_names_have_docstrings() -> None:
    bare = []
    for path in PYTHON:
        if path.relative_to(ROOT).parts[0] != "ep_a2a":
            continue
        tree = ast.parse(path.read_text())
        if tree.body and not ast.get_docstring(tree):
            bare.append(show(path))
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            # abi.h describes the structs that native.py mirrors
            mirror = isinstance(node, ast.ClassDef) and any("Structure" in ast.unparse(base) for base in node.bases)
            overload = any(ast.unparse(one) == "overload" for one in node.decorator_list)
            if not mirror and not overload and not ast.get_docstring(node):
                bare.append(f"{show(path, node.lineno)} {node.name}")
    expect_none(bare, "no docstring")


# ---- pins --------------------------------------------------------------------------------------------------------


def test_pins_are_the_same_everywhere() -> None:
    pins = re.compile(r"\b(ruff|mypy|clang-format)==([\w.]+)")
    project = dict(pins.findall((ROOT / "pyproject.toml").read_text()))
    hooks = pins.findall((ROOT / ".pre-commit-config.yaml").read_text())
    assert set(project) == {"ruff", "mypy", "clang-format"}
    assert {name for name, _ in hooks} == {"ruff", "clang-format"}  # mypy runs in the project's own environment
    assert all(project[name] == version for name, version in hooks)


def test_versions_agree() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version
    assert newest
    assert version[1] == newest[1]
