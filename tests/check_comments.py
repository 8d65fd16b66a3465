"""Checks comments: a formula has a line of its own, C++ lines fit in 120 columns, and a few phrases are not used.

The comment on a struct of arguments is where a formula is written down. A formatter that joins the lines of a comment
makes one paragraph of several formulas, which nobody can read.
"""

import pathlib
import re
import sys
import unicodedata

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPP = {".h", ".cuh", ".cpp", ".cu"}
TEXT = CPP | {".py", ".md", ".cmake", ".sh", ".txt", ".toml"}
COLUMNS = 120

#: "one per": a float per row, not "a float a row".
PHRASE = re.compile(r"\ba (float|bit|row|flag|slot|gradient) an? ")

#: What stands for itself: arguments, indices, shapes, quoted code.
NESTED = re.compile(r"\([^()]*\)|\[[^][]*\]|\{[^{}]*\}")
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")
#: A name, or what a function gives, and `=` or `←`.
DEFINES = re.compile(r"(?<!\S)(\S*[^\W\d]\S*) ([=←])(?= |$)")
#: Where the right side of an equation ends.
END = re.compile(r"[,;:]|\.( |$)| (and|but|for|in|is|of|or|over|where|with) ")
#: An expression, not the word or number that a name stands for: an operator, an index or exponent, or a call.
EXPRESSION = re.compile(r"[·+−*/%^√ΣΠ‖|ᵀ²³⌈⌊]|\S\(\)|\w - \w")


def comment_of(line):
    """The text of a C++ line's comment, empty where there is none."""
    found = re.search(r"(?:^|\s)//[/!]?<?(.*)", line)
    return found[1] if found else ""


def equations(comment):
    """How many equations a line holds. `kWidth = 8` and `m = mask` say what a name stands for: they are none."""
    text, before = QUOTED.sub("q", comment), None
    while text != before:
        before, text = text, NESTED.sub(lambda m: "⟨" + "⟩", text)
    text = text.replace("⟨⟩", "()")
    starts = list(DEFINES.finditer(text))
    count = 0
    for this, after in zip(starts, starts[1:] + [None]):
        right = text[this.end() : after.start() if after else len(text)]
        right = re.split(END, " " + right.strip(), maxsplit=1)[0].strip()
        count += bool(EXPRESSION.search(right)) or not text[this.end() :].strip()
    return count


def width(line):
    return sum(not unicodedata.combining(c) for c in line)


def problems_of(name, text):
    """What is wrong in a file's text, by line."""
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        if pathlib.Path(name).suffix in CPP:
            if equations(comment_of(line)) > 1:
                yield f"{where}: two equations on a line: {line.strip()}"
            if width(line) > COLUMNS:
                yield f"{where}: longer than {COLUMNS} columns"
        if found := PHRASE.search(line):
            yield f'{where}: "{found[0].strip()} ..." should be "a {found[1]} per ...": {line.strip()}'


def problems():
    files = [p for p in ROOT.iterdir() if p.is_file()]
    for folder in ("liger", "python", "tests", "benchmarks", "examples", "docs", "cmake"):
        files += (ROOT / folder).rglob("*")
    for path in sorted(files):
        if path.suffix in TEXT and path.name not in ("check_comments.py", "test_checks.py"):
            yield from problems_of(path.relative_to(ROOT).as_posix(), path.read_text())


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found) or "comments: every formula on a line of its own")
    sys.exit(bool(found))
