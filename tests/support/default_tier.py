"""Which cases of a test function the default tier runs; `pytest -m full` runs the others.

    unmarked                 a covering array: each value of each axis, in as few cases as show them all
    @pytest.mark.costly      one case, with values that no other costly function of the file shows, where it has one
    @pytest.mark.full        none

An axis is a parameter; stacked `parametrize` are a matrix, whose full product both tiers run together.
"""

Values = frozenset[tuple[str, int]]


def cases_left_out(items):
    """Cases of `items` that the default tier does not run; those marked `slow` are of no tier."""
    functions = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            key = (item.path, getattr(item, "cls", None), getattr(item, "originalname", item.name))
            functions.setdefault(key, []).append(item)
    shown = {}
    for (path, *_), cases in functions.items():
        # A case that this machine or this release skips represents nobody.
        able = [case for case in cases if not is_skipped_alone(case)] or cases
        if cases[0].get_closest_marker("costly") is not None:
            of_file = shown.setdefault(path, set())
            kept = [max(able, key=lambda case: len(values_of(case) - of_file))]
            of_file |= values_of(kept[0])
        else:
            kept = covering(able)
        yield from (case for case in cases if case not in kept)


def covering(cases):
    """Few cases that show each value which the cases show, the first of equals first."""
    missing = set().union(*map(values_of, cases))
    kept = [cases[0]]
    missing -= values_of(cases[0])
    while missing:
        best = max(cases, key=lambda case: len(missing & values_of(case)))
        kept.append(best)
        missing -= values_of(best)
    return kept


def values_of(case):
    """(parameter, identity of its value): cases of one matrix share the objects that `parametrize` was given."""
    callspec = getattr(case, "callspec", None)
    return frozenset() if callspec is None else frozenset((name, id(value)) for name, value in callspec.params.items())


def is_skipped_alone(case):
    """Whether a mark of this case skips it, rather than one of its function."""
    of_function = getattr(getattr(case, "function", None), "pytestmark", ())
    return any(mark.name.startswith("skip") for mark in case.own_markers if mark not in of_function)
