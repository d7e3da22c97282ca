"""Print the side-by-side tables of one asv result file, in Markdown.

    python asv_benchmarks/side_by_side.py asv_benchmarks/results/MACHINE/COMMIT-ENVIRONMENT.json

A row is a case, a column a library. A cell is the median in microseconds with the lower and the upper quartile; the
fastest of a row is bold, a dash is what was skipped. Only the standard library is needed.
"""

import argparse
import ast
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path

# Title, and where the columns come from: (suite, end of the class's name without its target, {value of the last
# parameter: heading}); an empty dictionary takes every value as its own heading.
NUMBAKNN_CALLS = {"knn plan": "plan of `knn`", "knn": "`knn`", "query plan": "plan of `query`", "query": "`query`"}
TABLES = {
    "one-shot": (
        "One call: build and query, waited for",
        [("launch", "Synchronised", {"knn plan": "numbaknn, plan"}), ("neighbors", "OneShot", {})],
    ),
    "query": (
        "Query of an index that stands, waited for",
        [("launch", "Synchronised", {"query plan": "numbaknn, plan"}), ("neighbors", "Query", {})],
    ),
    "build": ("Build, waited for", [("neighbors", "Build", {})]),
    "balls": ("All points within a radius, waited for", [("balls", "Balls", {})]),
    "pipelined": (
        "numbaknn back to back, one wait behind the last, a call",
        [("launch", "Pipelined", NUMBAKNN_CALLS), ("launch", "PipelinedMore", NUMBAKNN_CALLS)],
    ),
    "submit": ("numbaknn, the host's time to submit a call", [("launch", "Submit", NUMBAKNN_CALLS)]),
    "first": ("A new process, code compiled before", [("imports", "Import", {}), ("imports", "FirstCall", {})]),
    "workspace": ("numbaknn, what a plan holds and launches", [("launch", "Workspace", {})]),
}
LAST_COLUMNS = [
    "SciPy cKDTree",
    "pykdtree",
    "CuPy KDTree",
    "torch cdist",
    "torch cdist compiled",
    "torch direct compiled",
]
CLOUDS = {"cube": "cube", "subset": "cube, subset", "surface": "surface", "surface_subset": "surface, subset"}
TARGETS = {"cpu": "CPU", "cuda": "CUDA"}


def main():
    arguments = parse_arguments()
    figures = list(read(arguments.result))
    print(described(arguments.result))
    for name in arguments.table or TABLES:
        title, sources = TABLES[name]
        if name == "workspace":
            print_workspace(title, figures)
        elif name == "first":
            print_first(title, figures)
        else:
            for target in arguments.target or TARGETS:
                print_side_by_side(f"{title} ({TARGETS[target]})", sources, target, figures)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a result file of asv")
    parser.add_argument("--table", action="append", choices=TABLES, help="only this one; may be given again")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one")
    return parser.parse_args()


# -- asv's format ----------------------------------------------------------------------------------------------------


def read(path):
    """Yield (suite, class, method, parameters, (median, lower quartile, upper quartile)) of what was measured.

    The quartiles of a `track_` benchmark are None.
    """
    data = json.loads(path.read_text())
    for name, row in data["results"].items():
        entry = dict(zip(data["result_columns"], row))
        count = len(entry.get("result") or ())
        axes = [[literal(text) for text in axis] for axis in entry["params"]]
        lower, upper = (entry.get(column) or [None] * count for column in ("stats_q_25", "stats_q_75"))
        for values, *figure in zip(itertools.product(*axes), entry.get("result") or (), lower, upper):
            if figure[0] is not None and not math.isnan(figure[0]):
                yield *name.split("."), values, tuple(figure)


def literal(text):
    """A parameter, which asv keeps as its repr."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def described(path):
    """One line on the machine and the commit."""
    data = json.loads(path.read_text())
    machine = {}
    if (path.parent / "machine.json").exists():
        machine = json.loads((path.parent / "machine.json").read_text())
    fields = [machine.get(field) for field in ("machine", "cpu", "ram", "os")]
    return f"{', '.join(filter(None, fields)) or path.parent.name}; commit {data['commit_hash'][:8]}"


# -- Tables ----------------------------------------------------------------------------------------------------------


def print_side_by_side(title, sources, target, figures):
    headings, rows = [], defaultdict(dict)
    for suite, ending, names in sources:
        for its_suite, its_class, _, values, figure in figures:
            if its_suite != suite or not its_class.removesuffix(TARGETS[target]).endswith(ending):
                continue
            *case, its_target, column = values
            if its_target != target or (names and column not in names):
                continue
            heading = names.get(column, column)
            headings += [heading] if heading not in headings else []
            rows[tuple(case)][heading] = figure
    if rows:
        headings.sort(key=lambda heading: LAST_COLUMNS.index(heading) if heading in LAST_COLUMNS else -1)
        print(f"\n### {title}\n")
        lines = []
        for case in sorted(rows, key=order):
            best = min(figure[0] for figure in rows[case].values())
            lines.append([label(case), *(cell(rows[case].get(heading), best) for heading in headings)])
        print_table(["µs, median (quartiles)", *headings], lines)


def order(case):
    *sizes, cloud, dtype = case
    return dtype, sizes[:-1], sizes[-1], list(CLOUDS).index(cloud)


def label(case):
    """(n_queries, n_points, k, cloud, dtype), (n_points, cloud, dtype) of a build, or (answer, n_queries, n_points,
    average, cloud, dtype) of balls."""
    *sizes, cloud, dtype = case
    if isinstance(sizes[0], str):
        answer, *sizes = sizes
        words = [f"{answer}, {sizes[0]:,} × {sizes[1]:,}", f"{sizes[2]} in each"]
    elif len(sizes) == 1:
        words = [f"{sizes[0]:,} points"]
    else:
        words = [f"{sizes[0]:,} × {sizes[1]:,}", f"k={sizes[2]}"]
    return ", ".join([*words, CLOUDS[cloud], *([] if dtype == "float32" else [dtype])])


def cell(figure, best):
    if figure is None:
        return "–"
    median, lower, upper = (microseconds(seconds) for seconds in figure)
    return f"**{median}** ({lower}–{upper})" if figure[0] == best else f"{median} ({lower}–{upper})"


def microseconds(seconds):
    return f"{1e6 * seconds:,.{1 if seconds < 1e-4 else 0}f}"


def print_first(title, figures):
    lines = [
        [f"`import {values[0]}`" if name == "Import" else f"first `knn`, {TARGETS[values[0]]}", cell(figure, None)]
        for suite, name, _, values, figure in figures
        if suite == "imports"
    ]
    if lines:
        print(f"\n### {title}\n")
        print_table(["µs, median (quartiles)", ""], sorted(lines, reverse=True))


def print_workspace(title, figures):
    rows = defaultdict(dict)
    for suite, name, method, values, figure in figures:
        if suite == "launch" and "Workspace" in name:
            rows[values[:5]][method] = figure[0]
    if rows:
        print(f"\n### {title}\n")
        lines = []
        for case in sorted(rows, key=order):
            found = rows[case]
            bytes_held, launches = (found.get(f"track_{what}", math.nan) for what in ("device_bytes", "launches"))
            lines.append([label(case), f"{bytes_held:,.0f}", f"{launches:.0f}"])
        print_table(["plan of `knn`", "workspace, bytes", "launches"], lines)


def print_table(headings, lines):
    print(f"| {' | '.join(headings)} |")
    print(f"|---|{'---:|' * (len(headings) - 1)}")
    for line in lines:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
