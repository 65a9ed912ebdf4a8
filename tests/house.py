"""The size and the layering of the code, as figures: ``python -m tests.house``.

Counts lines, and lines of code (without blanks, comments and docstrings), of the package, of what surrounds it and of
the tests; modules, files a folder, long files; and how much ``import medha.llm`` reaches, every import statement
followed, those in functions too.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def files(*folders: str) -> list[Path]:
    """The Python files of some folders of the project."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def num_lines(paths: Iterable[Path]) -> int:
    """Lines of files."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def num_code_lines(paths: Iterable[Path]) -> int:
    """Lines of files that hold code: no blanks, comments and docstrings."""
    return sum(len(_code_lines(path.read_text())) for path in paths)


def _code_lines(text: str) -> set[int]:
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docs


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in files("medha")}


def import_nodes(node: ast.AST, *, at_import: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements below a node; with ``at_import`` only those that run when the module is imported."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    if at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    children = list(ast.iter_child_nodes(node))
    if at_import and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = node.orelse  # type: ignore[assignment]
    for child in children:
        yield from import_nodes(child, at_import=at_import)


@cache
def imported(name: str, *, at_import: bool = False) -> set[str]:
    """Modules that a module imports; ``from medha.a import b`` is ``medha.a.b`` if that is a module."""
    found: set[str] = set()
    for node in import_nodes(ast.parse(MODULES[name].read_text()), at_import=at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        assert node.module and not node.level, f"{name} imports by a relative name"
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            found.add(full if full in MODULES else node.module)
    return found


def _named(name: str) -> set[str]:
    """Modules of which a table in this one names a part, as ``medha.a.b:Class``."""
    nodes = ast.walk(ast.parse(MODULES[name].read_text()))
    words = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {module for module, colon, _ in (word.partition(":") for word in words) if colon and module in MODULES}


def reached(start: str) -> set[str]:
    """The modules that importing one brings in, packages above them included."""
    found: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += (imported(name) | _named(name)) & set(MODULES)
    # The packages above them run, too; what those load on demand, and nobody here asks for, is not followed.
    return found | {name.rpartition(".")[0] for name in found} - {""}


def main() -> None:
    """Print the figures."""
    medha, around, tests = files("medha"), files("examples", "tools"), files("tests")
    print(f"medha: {num_lines(medha):,} lines, {num_code_lines(medha):,} of code, {len(medha)} modules")
    print(f"medha, examples, tools: {num_code_lines([*medha, *around]):,} lines of code")
    print(f"tests: {num_lines(tests):,} lines")
    print(f"medha.llm reaches {num_lines(MODULES[name] for name in reached('medha.llm')):,} lines")
    folders = Counter(path.parent.relative_to(ROOT) for path in medha if path.name != "__init__.py")
    print("files a folder:", ", ".join(f"{folder} {count}" for folder, count in folders.most_common()))
    long = sorted(((num_lines([path]), module_name(path)) for path in medha), reverse=True)
    print("above 400 lines:", ", ".join(f"{name} {lines}" for lines, name in long if lines > 400) or "none")


if __name__ == "__main__":
    sys.exit(main())
