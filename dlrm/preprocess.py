"""Raw data to memory-mapped binary.

``python -m dlrm.preprocess --data criteo --input FILE... --out DIR``

>>> main(["--data", "criteo", "--input", "nowhere.txt", "--out", "/tmp/out"])
2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dlrm import cli
from dlrm.datasets.criteo.format import PARTS, SPLITS, TRANSFORMS, CriteoSettings
from dlrm.datasets.criteo.pool import WorkerDied
from dlrm.datasets.criteo.prepare import Prepared, preprocess_criteo
from dlrm.errors import InputError

__all__ = ["CriteoSettings", "Prepared", "main", "parser", "preprocess_criteo", "summary"]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    defaults = CriteoSettings()
    top = argparse.ArgumentParser(
        prog="python -m dlrm.preprocess",
        description="Turn raw Criteo files (Kaggle train.txt, or day_0 to day_23) into binary that "
        "training reads through a memory map. Memory stays below 1.5 GB whatever the length. A run "
        "that was killed goes on where it stopped; one that is up to date ends at once.",
    )
    files = top.add_argument_group("files")
    files.add_argument("--data", choices=["criteo"], default="criteo", help="default: criteo")
    files.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="raw files in the order of their days (day_0, day_1, ... are put in order): plain, "
        "gzip or zstd; tabs or commas; with or without a header; found from the content",
    )
    files.add_argument("--out", required=True, metavar="DIR", help="the directory to make")
    files.add_argument(
        "--force",
        action="store_true",
        help="make a preprocessed directory again, though it is up to date, or was made from other "
        "inputs or with other settings (default: leave the first, refuse the second)",
    )
    ids = top.add_argument_group("categorical values")
    ids.add_argument(
        "--vocab-threshold",
        type=int,
        default=None,
        metavar="N",
        help="values seen less than N times get row 0, as unknown ones do "
        f"(default: {defaults.vocab_threshold}, which trains row 0 on the values seen once)",
    )
    ids.add_argument(
        "--vocab-rows",
        choices=["train", "all"],
        default=None,
        help="the rows that are counted; 'all' is the published preprocessing, and lets the "
        f"vocabulary see val and test (default: {defaults.vocab_rows})",
    )
    ids.add_argument(
        "--hash-rows",
        type=int,
        metavar="N",
        help="no vocabulary: hash ids into N rows, row 0 for missing values (default: vocabulary)",
    )
    ids.add_argument(
        "--vocab-from",
        metavar="DIR",
        help="encode with the vocabulary of this preprocessed directory (default: count a new one)",
    )
    dense = top.add_argument_group("dense values")
    dense.add_argument(
        "--dense-transform",
        choices=TRANSFORMS,
        help="missing becomes 0. log1p: log(x+1), negative values set to 0 before and counted, as "
        "published; signed_log1p: sign(x) log(|x|+1); identity: x (default: log1p, or that of "
        "--vocab-from)",
    )
    rows = top.add_argument_group("rows")
    rows.add_argument(
        "--bad-rows",
        choices=["error", "skip"],
        default=defaults.bad_rows,
        help="refuse the input at its first bad row, or leave bad rows out, count and list them in "
        f"bad_rows.txt (default: {defaults.bad_rows})",
    )
    rows.add_argument(
        "--split",
        choices=SPLITS,
        help="day: the last day is halved into val and test, as the benchmarks do; the last day is "
        "the last file, or the last seventh of a single file's rows. time: --fractions in file "
        "order. random: exactly --fractions, drawn with --split-seed. train, test: all rows there "
        "(default: day; test with --vocab-from)",
    )
    rows.add_argument(
        "--fractions",
        nargs=3,
        type=float,
        default=list(defaults.fractions),
        metavar=("TRAIN", "VAL", "TEST"),
        help=f"for time and random (default: {' '.join(map(str, defaults.fractions))})",
    )
    rows.add_argument(
        "--split-seed", type=int, default=defaults.split_seed, help="for random (default: 0)"
    )
    running = top.add_argument_group("running (no influence on the result)")
    running.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one a core, at most 8)"
    )
    running.add_argument("--quiet", action="store_true", help="print errors only")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 2 for refused input, 1 or 130 if cut off."""

    def command() -> int:
        args = parser().parse_args(argv)
        try:
            prepared = preprocess_criteo(
                args.input,
                args.out,
                _settings(args),
                workers=args.workers,
                force=args.force,
                quiet=args.quiet,
            )
        except WorkerDied as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted. The same command goes on where it stopped", file=sys.stderr)
            return 130
        if not args.quiet:
            print(summary(prepared))
        return 0

    return cli.run(command)


def _settings(args: argparse.Namespace) -> CriteoSettings:
    if args.hash_rows is not None or args.vocab_from is not None:
        chosen = "--hash-rows" if args.hash_rows is not None else "--vocab-from"
        for flag in ("vocab_threshold", "vocab_rows"):
            if getattr(args, flag) is not None:
                name = "--" + flag.replace("_", "-")
                raise InputError(f"{name} has no effect with {chosen}: leave out one of them")
    defaults = CriteoSettings()
    return CriteoSettings(
        vocab_threshold=(
            defaults.vocab_threshold if args.vocab_threshold is None else args.vocab_threshold
        ),
        vocab_rows=args.vocab_rows or defaults.vocab_rows,
        hash_rows=args.hash_rows,
        vocab_from=args.vocab_from,
        dense_transform=args.dense_transform,
        bad_rows=args.bad_rows,
        split=args.split,
        fractions=tuple(args.fractions),
        split_seed=args.split_seed,
    )


def summary(prepared: Prepared) -> str:
    """A few lines on the result: rows, splits, tables, and all that was not taken as it is."""
    meta = prepared.meta
    if prepared.up_to_date:
        return f"{prepared.folder}: up to date (fingerprint {meta['fingerprint']})"
    rate = meta["rows"] / max(prepared.seconds, 1e-9)
    tables = meta["table_rows"]
    lines = [
        f"{prepared.folder}: {meta['rows']:,} rows in {prepared.seconds:.1f} s "
        f"({rate:,.0f} rows/s), fingerprint {meta['fingerprint']}"
    ]
    for part in PARTS:
        first, past = meta["splits"][part]
        if past > first:
            share = meta["positives"][part] / (past - first)
            lines.append(f"  {part}: {past - first:,} rows, {100 * share:.2f}% positive")
    lines.append(f"  tables: {sum(tables):,} rows in all, the largest has {max(tables):,}")
    if negative := sum(meta["dense_negative"]):
        verb = "set to 0" if meta["settings"]["dense_transform"] == "log1p" else "kept"
        lines.append(f"  dense: {negative:,} negative values, {verb}")
    if total := meta["bad_rows"]["total"]:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in meta["bad_rows"]["kinds"].items())
        lines.append(f"  bad rows left out: {total:,} ({kinds}), listed in bad_rows.txt")
    lines += [
        f"  note: the last line of {source['path']} has no line end; it was taken as whole"
        for source in meta["sources"]
        if source["last_line_without_end"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
