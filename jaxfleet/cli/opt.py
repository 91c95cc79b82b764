"""`jaxfleet opt`: runs passes over programs."""

import argparse
from typing import Any

from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.cli.app import log
from jaxfleet.cli.files import STDIN, read_programs, shown, write_programs
from jaxfleet.cli.passes import add_import_option, import_passes
from jaxfleet.errors import PassError
from jaxfleet.ir import Program, verify
from jaxfleet.pipeline import (
    Dump,
    Instrument,
    Pass,
    Statistics,
    Timing,
    new_dump_folder,
    parse_pipeline,
    remove_dumps,
    run_pipeline,
)

_EXAMPLE = """\
example:
  jaxfleet opt --passes='dce,fuse_allreduce{bucket_size_bytes=65536}' --timing step.txt
"""


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "opt",
        help=about,
        description="Reads programs, runs passes on each, and prints what comes out.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", default=STDIN, help="stdin unless given")
    parser.add_argument("--passes", metavar="PIPELINE", default="", help="a,b{option=1}: in order")
    parser.add_argument("--verify-only", action="store_true", help="check, run and print nothing")
    parser.add_argument("--timing", action="store_true", help="show how long each pass took")
    parser.add_argument("--statistics", action="store_true", help="show operators by type")
    parser.add_argument("--dump-dir", metavar="DIR", help="write what each pass did there")
    parser.add_argument("--source", action="store_true", help="print source lines as comments")
    parser.add_argument("-o", "--output", metavar="OUT", help="stdout unless given")
    add_import_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    import_passes(args)
    passes = parse_pipeline(args.passes)
    if args.verify_only and passes:
        raise PassError("--verify-only runs no passes", hint="leave out one of the two")
    programs = read_programs(args.file)
    if args.verify_only:
        _verify(programs, shown(args.file))
        return 0
    if args.dump_dir:
        remove_dumps(args.dump_dir)
    several = len(programs) > 1
    results = [_optimized(program, passes, args, several=several) for program in programs]
    write_programs(results, out=args.output, source=args.source)
    return 0


def _verify(programs: list[Program], name: str) -> None:
    for program in programs:
        verify(program, more_rules=meaning_rules)
        size = f"{program.op_count} operators in {len(program.blocks)} blocks"
        log(f"{name}: program '{program.name}' is valid: {size}")


def _optimized(
    program: Program, passes: tuple[Pass, ...], args: argparse.Namespace, *, several: bool
) -> Program:
    tables: list[Timing | Statistics] = []
    if args.timing:
        tables.append(Timing())
    if args.statistics:
        tables.append(Statistics())
    instruments: list[Instrument] = list(tables)
    if args.dump_dir:
        folder = new_dump_folder(args.dump_dir, program.name) if several else args.dump_dir
        instruments.append(Dump(folder, source=args.source))
    result = run_pipeline(program, passes, instruments=instruments, rules=meaning_rules)
    for table in tables:
        log(f"program '{program.name}'\n{table}")
    return result
