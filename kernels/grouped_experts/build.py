"""Makes a library of both products for a machine without nvidia-cutlass-dsl: python -m ... --help.

Needs that package and gcc here, but no card; the library needs CUDA's runtime there, which torch brings along.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import click

from flowinfer.kernels.grouped_experts.products import LIBRARY, name_of

_ENTRY = """
static {name}_Kernel_Module_t module_{name};
static int loaded_{name};
int {name}(void *x, void *weights, void *out, void *tokens, void *owner, void *num_blocks, int rows_in, int rows_out,
           int programs, void *stream) {{
  if (!loaded_{name}) {{
    {name}_Kernel_Module_Load(&module_{name});
    loaded_{name} = 1;
  }}
  return cute_dsl_{name}_wrapper(&module_{name}, x, weights, out, tokens, owner, num_blocks, rows_in, rows_out,
                                 programs, (cudaStream_t)stream);
}}
"""


@click.command()
@click.option(
    "--size", "sizes", type=(int, int, int), multiple=True, required=True,
    help="Hidden size, width of an expert and number of experts; may be given again.",
)  # fmt: skip
@click.option("--cuda", type=click.Path(path_type=Path), default="/usr/local/cuda", show_default=True)
@click.argument("library", type=click.Path(path_type=Path))
def build(sizes: tuple[tuple[int, int, int], ...], cuda: Path, library: Path) -> None:
    """Compiles both products for these sizes into LIBRARY."""
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"  # read as the package is imported; else it asks the card that is here
    from flowinfer.kernels.grouped_experts.cute import compile_product

    with tempfile.TemporaryDirectory() as folder:
        source = ""
        objects = []
        products = [
            part for hidden, width, experts in sizes
            for part in ((hidden, width, experts, True), (width, hidden, experts, False))
        ]  # fmt: skip
        for size_in, size_out, experts, gated in products:
            name = name_of(size_in, size_out, experts, gated)
            compiled = compile_product(size_in, size_out, experts, gated)
            compiled.export_to_c(file_path=folder, file_name=name, function_prefix=name)  # type: ignore[attr-defined]
            source += f'#include "{name}.h"\n{_ENTRY.format(name=name)}'
            objects.append(f"{folder}/{name}.o")
        entries = Path(folder) / "entries.c"
        entries.write_text(source, encoding="utf-8")
        subprocess.run(
            ["gcc", "-O2", "-s", "-shared", "-fPIC", f"-I{cuda}/include", str(entries), *objects, str(_runtime()),
             f"-L{cuda}/lib64", f"-L{cuda}/lib", "-lcudart", "-o", str(library)],
            check=True,
        )  # fmt: skip
    click.echo(f"{library}: set {LIBRARY} to its path where it is to be used.")


def _runtime() -> Path:
    """The static part of the DSL's runtime, which such a library contains."""
    import nvidia_cutlass_dsl

    (found, *_) = sorted(Path(nvidia_cutlass_dsl.__path__[0]).glob("cu*/lib/libcuda_dialect_runtime_static.a"))
    return found


if __name__ == "__main__":
    build()
