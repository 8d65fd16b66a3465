"""What a patch does, as a table, and how to take it back. A Report makes each replacement and has a line for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from liger_kernel.operators.coverage import has_replaced_forward
from liger_kernel.transformers.patching.place import Edits, replace_class


@dataclass(frozen=True)
class Replacement:
    """What stands in for `name`; `count` is the number of modules, None for a class or a function."""

    switch: str
    name: str
    by: str
    count: int | None = None

    @property
    def where(self):
        return self.name if self.count is None else f"{self.name} ({self.count} module{'s' * (self.count != 1)})"


@dataclass(frozen=True)
class Skip:
    """What was asked for and not done, and why."""

    switch: str
    name: str
    reason: str

    where = property(lambda self: self.name)
    by = property(lambda self: f"kept: {self.reason}")


class _Kept:
    """Holds a report in the dict of a model, which lives no longer for it. A copy of the model, or a pickle, has none:
    undo is not for them."""

    def __init__(self, report: "Report | None" = None):
        self.report = report

    def __deepcopy__(self, memo):
        return _Kept()

    def __reduce__(self):
        return _Kept, ()


#: The columns of a report on a tool, whose attributes are replaced in modules and classes.
OF_TOOLS = "attribute", "of"


@dataclass
class Report:
    """What a patch did; `replaced` includes what an earlier patch had replaced already. `columns` are the titles of
    names and of switches in its table."""

    family: str
    replaced: list[Replacement] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    edits: Edits = field(default_factory=Edits, repr=False)
    columns: tuple[str, str] = ("module", "operator")

    def rebind(self, owner: Any, attribute: str, new: Any, switch: str, name: str, by: str) -> None:
        """Replace an attribute of a module or of a class, and note it."""
        self.edits.set(owner, attribute, new)
        self.note(switch, name, by)

    def wrap(self, owner: Any, attribute: str, make: Callable[[Any], Any], switch: str, name: str, by: str) -> None:
        """Replace an attribute by what `make` makes of it; of one that is wrapped already, of the original."""
        original = getattr(owner, attribute)
        original = getattr(original, "liger_original", original)
        new = make(original)
        new.liger_original = original
        self.rebind(owner, attribute, new, switch, name, by)

    def convert(self, module: Any, part: Any, switch: str, name: str, by: str, /, **attributes: Any) -> None:
        """Turn a live module into one whose class has `part` before it (replace_class), and count it."""
        replace_class(module, part, self.edits, **attributes)
        self.note(switch, name, by, 1)

    def give_forwards(
        self, owners: Iterable[Any], part: Any, switch: str, by: Callable[[Any], str | None],
        fits: Callable[[Any, Any], object] | None = None,
    ) -> None:  # fmt: skip
        """Give classes, or live modules, the forward that a NewForward makes for their class, where there is one.

        `by` is the report's word for a forward, None for one that is not of this part; `fits` may refuse a forward for
        an owner.
        """
        for owner in owners:
            of_class = isinstance(owner, type)
            cls: Any = owner if of_class else type(owner)
            forward = part.make(cls)
            if forward is not None:
                if fits is not None and not fits(owner, forward):
                    continue
                if not of_class and has_replaced_forward(owner):
                    self.skip(switch, cls.__name__, "its forward was replaced on the instance")
                    continue
                if of_class:
                    self.edits.set(cls, "forward", forward)
                else:
                    replace_class(owner, part, self.edits)
            if word := by(forward or cls.forward):
                self.note(switch, cls.__name__, word, None if of_class else 1)

    def note(self, switch: str, name: str, by: str, count: int | None = None) -> None:
        """Note what is replaced; modules are added to those that were noted before."""
        for i, entry in enumerate(self.replaced):
            if count and entry.count and (switch, name, by) == (entry.switch, entry.name, entry.by):
                self.replaced[i] = replace(entry, count=entry.count + count)
                return
        self.replaced.append(Replacement(switch, name, by, count))

    def skip(self, switch: str, name: str, reason: str) -> None:
        """Note what is not replaced, once."""
        if (entry := Skip(switch, name, reason)) not in self.skipped:
            self.skipped.append(entry)

    def undo(self) -> None:
        """Restore everything that this patch has replaced."""
        self.edits.undo()

    def add(self, other: "Report") -> None:
        """Take in what another patch did, which `undo` then restores too."""
        self.replaced += other.replaced
        self.skipped += other.skipped
        self.edits.add(other.edits)

    def keep_on(self, model) -> None:
        """Put the report on a model, for `kept_on`; undo takes it off."""
        self.edits.set(model, "liger_report", _Kept(self))

    @staticmethod
    def kept_on(model) -> "Report | None":
        """The report that was put on a model last."""
        kept = vars(model).get("liger_report")
        return None if kept is None else kept.report

    def line(self) -> str:
        """What was replaced and what was kept, in one line."""
        done: dict[str, int] = {}
        kept: dict[str, list[str]] = {}
        for entry in self.replaced:
            done[entry.switch] = done.get(entry.switch, 0) + (entry.count or 1)
        for skip in self.skipped:
            kept.setdefault(skip.reason, []).append(skip.name)
        replaced = ", ".join(f"{count} {switch}" for switch, count in done.items()) or "nothing"
        reasons = "; ".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in kept.items())
        return f"Replaced: {replaced}. " + (f"Kept: {reasons}." if kept else "")

    def __str__(self):
        rows = [
            (*self.columns, "replaced by"),
            *((entry.where, entry.switch, entry.by) for entry in (*self.replaced, *self.skipped)),
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"  {where:<{widths[0]}}  {switch:<{widths[1]}}  {by}" for where, switch, by in rows]
        return "\n".join([f"liger_kernel: {self.family}", *lines])
