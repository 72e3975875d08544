"""Bugs to plant in kernels and their launchers, of every kind that has been made, and the tests that must find each.

`test_planted.py` plants them one by one. A text is replaced where it first stands in the file; what comes before a gap,
written as ` ... `, only says where to look. To see what one bug does: `python -m tests.gpu.planted "part of its line"`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SECONDS = 240  # for the tests of one bug
FAILED = 1  # how pytest ends where tests failed; where it found none, or could not start, it ends otherwise
GAP = " ... "


class Bug(NamedTuple):
    kind: str
    file: str  # of `hetu/gpu_kernels/`
    right: str
    wrong: str
    tests: str  # a file of `tests/gpu/`, and words that select some of its tests

    def planted(self, text: str) -> str:
        """The text with the bug. ValueError if there is no place for it."""
        start, right = 0, self.right
        if GAP in right:
            before, right = right.split(GAP)
            start = text.find(before)
        place = text.find(right, start) if start >= 0 else -1
        if place < 0:
            raise ValueError(f"{self.file} does not have the text {self.right!r} any more: plant this bug elsewhere")
        return text[:place] + self.wrong + text[place + len(right) :]


def copied(folder: Path) -> Path:
    """A copy of the package and its tests, in which bugs may be planted."""
    for name in ("hetu", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", folder)
    return folder


def run(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Some tests of a copy, up to the first that fails; of long tables all cases, whichever the suite takes in turn."""
    file, _, words = tests.partition(" ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"tests/gpu/{file}"]
    selected = ["-m", "sampled or not nightly", *(["-k", words] if words else [])]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, *selected], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


def found(folder: Path, bug: Bug) -> subprocess.CompletedProcess[str]:
    """What the tests say with this bug in the copy, which is whole again afterward."""
    file = folder / "hetu" / "gpu_kernels" / bug.file
    text = file.read_text("utf-8")
    file.write_text(bug.planted(text), "utf-8")
    try:
        return run(folder, bug.tests)
    finally:
        file.write_text(text, "utf-8")


ADDED, IN_LINE = "test_extremes.py add_nothing", "test_far.py in_turn"
ROWS, REDUCTIONS, IDS = "test_large.py rows_of", "test_large.py in_stages", "test_large.py added_by_their_ids"
UPDATED = "test_large.py rows_are_updated"
PLAIN, TENSOR = "test_attention.py plain_kernels", "test_attention.py tensor_kernels"
CONV, NORM, GROUPS = "test_convolution.py test_kernels", "test_channels.py gradient", "test_groups.py operators_give"
FOLDS, ANYWHERE = "test_extremes.py folds_of_extremes", "test_kernels.py anywhere"
STRIDES, VECTORS = "test_groups.py any_strides", "test_groups.py vectors"

KINDS: dict[str, list[tuple[str, str, str, str]]] = {
    "a read outside an array": [
        ("scatter.cu", "id >= length) continue", "id > length) continue", ADDED),
        ("routing.cu", "moe_products ... slot >= 0 && slot < count", "slot >= 0", "test_routing.py"),
        ("runs.cu", "(place == 0 || sorted[place - 1] != id)", "(sorted[place - 1] != id)", IDS),
        ("runs.cu", "long long step = 1; ... place + step < limit && ", "", IDS),
        ("runs.cu", "while (step /= 2) ... place + step < limit && ", "", IDS),
        ("runs.cu", "if (i < some) row[i]", "row[i]", IDS),
        ("reduce.cu", "i < end; i += 8", "i <= end; i += 8", REDUCTIONS),
        ("tables.cu", "id >= 0 && id < length ? x[", "id >= 0 ? x[", "test_extremes.py ids"),
        ("images.cu", "h < height &&", "h <= height &&", FOLDS),
        ("sparse.cu", "column >= nodes || ", "", "test_sparse.py outside"),
        ("attention.cu", "row < queries ? total[place] : (T)0", "total[place]", PLAIN),
        ("attention_tensor.cu", "row < count ? *(const unsigned*)", "true ? *(const unsigned*)", TENSOR),
        ("convolution.cu", "result + r < results && ", "", CONV),
        ("rows.cu", "label >= 0 && label < width ? ", "label >= 0 ? ", "test_extremes.py labels"),
        ("groups.py", "unit and len(sizes) == outer + 1", "unit", GROUPS),
        ("tensors.cu", "begin + chunk < sizes[k] ? begin + chunk : sizes[k]", "begin + chunk", "test_many.py finite"),
    ],
    "a write outside an array": [
        ("runs.cu", " * PACK; k < inner;", " * PACK; k <= inner;", IDS),
        ("reduce.cu", "if (threadIdx.y == 0 && c < inner)", "if (threadIdx.y == 0)", REDUCTIONS),
        ("attention.cu", "if (first + r >= queries) continue;", "if (first + r > queries) continue;", PLAIN),
        ("random.cu", "b * each + j < n", "b * each + j <= n", "test_kernels.py random"),
        ("channels.cu", "if (threadIdx.y || c >= channels) return;", "if (threadIdx.y) return;", NORM),
        ("sparse.cu", "if (lane == 0 && e < entries)", "if (lane == 0)", "test_sparse.py sampled"),
        ("fit.cu", "if (first + 256 * j < columns)", "if (first + 256 * j <= columns)", "test_products.py"),
    ],
    "a missing barrier": [
        ("prelude.cu", "__syncthreads();  // an earlier reduction may still be read", "", ROWS),
        ("prelude.cu", "partial[threadIdx.x / 32] = v; ... __syncthreads();", "", ROWS),
        ("reduce.cu", "reduce_columns ... __syncthreads();", "", REDUCTIONS),
        (
            "reduce.cu",
            "y[k * inner + c] = total; ... __syncthreads();",
            "",
            "test_far.py last_rows or columns or results",
        ),
        ("channels.cu", "parts[own] = a; ... __syncthreads();", "", NORM),
        ("channels.cu", "step * blockDim.x]; ... __syncthreads();", "", NORM),
        ("attention.cu", "start += 32) { ... __syncthreads();", "", PLAIN),
        ("attention_tensor.cu", "__syncthreads();  // this tile is there", "", TENSOR),
        ("convolution.cu", "__syncthreads();  // this tile is there", "", CONV),
        ("warpgroups.cu", "__syncthreads();", "", CONV),
        ("update.cu", "__syncthreads();", "", "test_many.py updates_all"),
        ("group_text.py", '"    __syncthreads();",', "", GROUPS),
        ("group_text.py", '[*lines, "    }", "    __syncthreads();", "}"]', '[*lines, "    }", "}"]', GROUPS),
    ],
    "a missing wait of a warp or for copies": [
        ("attention.cu", "__syncwarp();", "", PLAIN),
        ("attention.cu", "changes[threadIdx.y][threadIdx.x] = change; ... __syncwarp();", "", PLAIN),
        ("attention_tensor.cu", "wait_for_copies();", "", TENSOR),
        ("convolution.cu", "wait_for_groups<STAGES - 2>();", "wait_for_groups<STAGES - 1>();", CONV),
        ("warpgroups.cu", "end_products(part);", "", CONV),
        ("warpgroups.cu", "show_to_products();", "", CONV),
    ],
    "a barrier that some do not reach": [
        (
            "channels.cu",
            "if (threadIdx.y < step) parts[own]",
            "if (threadIdx.y < step) __syncthreads(), parts[own]",
            NORM,
        ),
        (
            "prelude.cu",
            "if (threadIdx.x % 32 == 0) partial",
            "if (threadIdx.x % 32 == 0) __syncthreads(), partial",
            ROWS,
        ),
        ("rows.cu", "top = team_max(most);", "top = threadIdx.x ? team_max(most) : most;", ROWS),
        (
            "reduce.cu",
            "reduce_rows ... total = team_fold(",
            "if (begin + threadIdx.x < end) total = team_fold(",
            REDUCTIONS,
        ),
    ],
    "masks and lanes of a warp": [
        ("rows.cu", "if (other < width && (place == width", "if ((place == width", "test_large.py ties"),
        ("prelude.cu", "__shfl_xor_sync(0xffffffffu, v, step)", "__shfl_xor_sync(0xfffffffeu, v, step)", ROWS),
        ("prelude.cu", "int step = 16; step", "int step = 8; step", ROWS),
        (
            "rows.cu",
            "__shfl_xor_sync(0xffffffffu, place, step)",
            "__shfl_xor_sync(0xffffu, place, step)",
            "test_large.py ties",
        ),
        ("sparse.cu", "step >= LANES", "step > LANES", "test_sparse.py fixed_entries"),
        ("attention_tensor.cu", "__shfl_xor_sync(0xffffffffu, v, 2)", "__shfl_xor_sync(0xffffffffu, v, 4)", TENSOR),
    ],
    "where a fold begins": [
        ("group_text.py", "t = fold{n}::identity();", "t = 0;", GROUPS),
        ("prelude.cu", "(T)-infinite(), fmax<T>", "(T)-3e38, fmax<T>", FOLDS),
        ("prelude.cu", "(T)-infinite(), fmax<T>", "(T)0, fmax<T>", FOLDS),
        ("rows.cu", "most = -infinite()", "most = -3e38", FOLDS),
        ("rows.cu", "most = -infinite()", "most = 0", FOLDS),
        ("reduce.py", "{LIMITS.get((neutral, wide), neutral)}", '{neutral.replace("INFINITY", "3e38")}', FOLDS),
        ("reduce.py", '"-9223372036854775807LL - 1"', '"0"', FOLDS),
        ("attention.cu", "top[r] = -infinite()", "top[r] = 0", "test_extremes.py attention"),
        ("attention.cu", "top[r] = -infinite()", "top[r] = -3e38", "test_extremes.py attention"),
        ("attention_tensor.cu", "float most = -infinite()", "float most = 0", "test_extremes.py attention"),
        ("attention_tensor.cu", "top[m][1] = -infinite()", "top[m][1] = 0", "test_extremes.py attention"),
        ("images.cu", ": (T)-infinite();", ": (T)-3e38;", FOLDS),
        ("images.cu", ": (T)-infinite();", ": (T)0;", FOLDS),
    ],
    "NaN that gets lost": [
        ("prelude.cu", "a >= b || a != a ? a : b", "a >= b ? a : b", FOLDS),
        ("prelude.cu", "a <= b || a != a ? a : b", "b < a ? b : a", FOLDS),
        ("rows.cu", " || (a != a && b == b)", "", FOLDS),
        ("images.cu", "best = i + j == 0 ? v : fmax(best, v)", "best = i + j == 0 || v > best ? v : best", FOLDS),
        ("prelude.cu", "v != v ? 0x7fc0 : ", "", "test_kernels.py brain"),
    ],
    "positions beyond 32 bits": [
        ("rows.cu", "logits + row * width", "logits + (int)(row * width)", "test_far.py last_rows"),
        (
            "groups.py",
            "reach = (sum(abs(s) * n for s, n in zip(axes, sizes)) for axes in strides)",
            "reach = [0]",
            "test_far.py far_apart",
        ),
        ("scatter.cu", "long long place = (o * count + i) * inner", "int place = (o * count + i) * inner", IN_LINE),
        ("tables.py", "index_dtype(*(a.size for a in arrays))", '"int32"', "test_far.py many_ids"),
        (
            "images.cu",
            "const long long place = (plane + (long",
            "const int place = (plane + (long",
            "test_far.py channels_come",
        ),
        ("images.cu", "((long long)h * width + w) * side", "(h * width + w) * (int)side", "test_far.py channels_come"),
        ("channels.cu", "? k * channels + channel", "? (int)k * (int)channels + channel", "test_far.py batch_norm"),
        (
            "reduce.cu",
            "x[k / chunks * n + i]",
            "x[(int)(k / chunks * n + i)]",
            "test_far.py last_rows or columns or results",
        ),
        (
            "reduce.cu",
            "x[(k / chunks * n + i) * inner + c]",
            "x[(int)((k / chunks * n + i) * inner + c)]",
            "test_far.py last_rows or columns or results",
        ),
        ("machine.py", "1 << 30", "1 << 40", "test_far.py elements"),
        ("scatter.cu", "(long long)sorted[place] * inner", "(int)(sorted[place] * inner)", "test_far.py added"),
        ("runs.cu", "rows + order[p + i] * inner + k", "rows + (int)(order[p + i] * inner + k)", "test_far.py added"),
        ("update.cu", "(long long)sorted[place] * inner", "(int)(sorted[place] * inner)", "test_far.py added"),
        ("sparse.cu", "x + column * features + k", "x + (int)(column * features + k)", "test_far.py sparse"),
        ("routing.cu", "y + slot * features + f, v", "y + (int)(slot * features + f), v", "test_far.py routing"),
        (
            "attention.cu",
            "source[(first + j) * step + f]",
            "source[(int)((first + j) * step + f)]",
            "test_far.py attention",
        ),
        (
            "attention_tensor.cu",
            "(exists ? first + row : 0) * step",
            "(int)((exists ? first + row : 0) * step)",
            "test_far.py attention",
        ),
        ("prelude.cu", "blockIdx.z * x##_batch", "(int)(blockIdx.z * x##_batch)", "test_far.py attention"),
        ("fit.cu", "x[row * step", "x[(int)row * (int)step", "test_far.py another_length"),
    ],
    "limits of a launch": [
        ("reduce.py", "min(outer * chunks, 65535)", "outer * chunks", "test_far.py results"),
        (
            "machine.py",
            "min(-(-width // (threads * pack)), 65535)",
            "-(-width // (threads * pack))",
            "test_far.py wider",
        ),
        ("runs.cu", "k += (long long)gridDim.y * blockDim.x * PACK", "k += inner", "test_far.py wider"),
        ("attention.py", "max(q.shape[0], q.shape[2]) > MOST_BLOCKS", "q.shape[0] > MOST_BLOCKS", "test_far.py heads"),
        ("rows.py", "MOST_THREADS, TOGETHER = 512, 4", "MOST_THREADS, TOGETHER = 2048, 4", "test_far.py vocabulary"),
        ("channels.py", "MOST_CHANNELS = 65535", "MOST_CHANNELS = 1 << 40", "test_far.py channels"),
    ],
    "packs that are not aligned": [
        ("update.py", "for row in rows for a in row))", "for row in rows for a in row[:-1]))", ANYWHERE),
        ("update.py", "widest_pack(inner, rows, *tables)", "widest_pack(inner, rows, tables[0])", UPDATED),
        ("sparse.py", "widest_pack(features, x, out)", "widest_pack(features, x)", ANYWHERE),
        ("sparse.py", "widest_pack(features, a, b)", "widest_pack(features, a)", ANYWHERE),
        (
            "routing.py",
            "widest_pack(arrays[0].shape[-1], *arrays)",
            "widest_pack(arrays[0].shape[-1], arrays[0])",
            ANYWHERE,
        ),
        ("many.py", "widest_pack(CHUNK, *arrays)", "16 // max(a.dtype.itemsize for a in arrays)", ANYWHERE),
        (
            "groups.py",
            "gcd(sizes[-1], *(n for _, s in packed for n in s[:-1]),",
            "gcd(sizes[-1],",
            "test_large.py any_strides",
        ),
        ("machine.py", " or any(address(a) % (a.dtype.itemsize * pack) for a in arrays)", "", ANYWHERE),
        ("machine.py", "width % pack or ", "", IDS),
        ("tables.py", "widest_pack(inner, rows, out)", "widest_pack(inner, out)", IDS),
        ("tables.py", "widest_pack(inner, rows, out)", "widest_pack(inner, rows)", IDS),
        (
            "tables.py",
            "if row_bytes % 8 == 0 and (address(x) | address(out)) % 8 == 0:",
            "if row_bytes % 8 == 0:",
            ANYWHERE,
        ),
        (
            "channels.py",
            "aligned = not any(address(v) % 16 for v in (*vectors, *statistics))",
            "aligned = True",
            ANYWHERE,
        ),
        ("attention.py", "for place in (address(array), *steps)", "for place in steps", "test_attention.py chunks"),
        ("convolution.py", " and address(a) % 16 == 0", "", ANYWHERE),
        ("groups.py", "large = [*outs, *(arrays[k] for k in alike)]", "large = [arrays[k] for k in alike]", ANYWHERE),
        ("groups.py", "*(address(a) // a.itemsize for a, _ in packed)", "", VECTORS),
        ("rows.py", "widest_pack(16, array)", "16 // array.dtype.itemsize", ANYWHERE),
        ("prelude.cu", "-place & (PACK - 1)", "place & (PACK - 1)", GROUPS),
        ("groups.py", "if s == dense)", "if s[-1])", STRIDES),
    ],
    "launch bounds below the block": [
        ("attention.cu", "__launch_bounds__(256)", "__launch_bounds__(128)", PLAIN),
        ("attention_tensor.cu", "__launch_bounds__(128)", "__launch_bounds__(64)", TENSOR),
        ("convolution.cu", "__launch_bounds__(THREADS,", "__launch_bounds__(THREADS / 2,", CONV),
        ("rows.cu", "BLOCK = TEAM == 32 ? 256 : TEAM", "BLOCK = TEAM", ROWS),
    ],
    "what nobody wrote": [
        (
            "group_text.py",
            "if (threadIdx.x == 0) y{self.slot[n]}[k]",
            "if (threadIdx.x == 1) y{self.slot[n]}[k - 1]",
            GROUPS,
        ),
        (
            "prelude.cu",
            "threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : neutral",
            "partial[threadIdx.x % 32]",
            ROWS,
        ),
        (
            "tables.py",
            "return None if added is None else [partial(out.fill, 0), *added]",
            "return added",
            "test_kernels.py scatter_rows",
        ),
        ("tables.py", "    if pieces:", "    if pieces > 1:", IDS),
        ("attention.cu", "first + j < count && f < WIDTH ? ", "true ? ", PLAIN),
        ("routing.py", "partial(choice.fill, -1),", "", "test_routing.py"),
        ("many.py", "partial(out.fill, True), ", "", "test_many.py finite"),
    ],
    "ends of loops and chunks": [
        (
            "group_text.py",
            "for (int j = 1; j < {span}; j++) t{n}[0]",
            "for (int j = 2; j < {span}; j++) t{n}[0]",
            GROUPS,
        ),
        ("group_text.py", "begin = k % chunks * each;", "begin = k % chunks * width;", GROUPS),
        ("reduce.cu", "each = (n + chunks - 1) / chunks", "each = n / chunks", REDUCTIONS),
        ("channels.cu", "(steps + gridDim.x - 1) / gridDim.x", "steps / gridDim.x", NORM),
        ("tensors.cu", "i = packed + threadIdx.x", "i = packed + 1 + threadIdx.x", "test_many.py updates_all"),
        ("runs.cu", "place + PIECE < count ? place + PIECE : count", "place + PIECE", IDS),
        ("runs.cu", "p < cut; p += TOGETHER", "p < cut - 1; p += TOGETHER", IDS),
        ("runs.cu", "(end + PIECE - 1) / PIECE", "end / PIECE", IDS),
        ("group_text.py", "begin + each < width ? begin + each : width", "begin + each", GROUPS),
        ("convolution.cu", "(channels + DEPTH - 1) / DEPTH", "channels / DEPTH", CONV),
    ],
    "positions and strides": [
        ("group_text.py", "i / 16, words{n}", "i / 32, words{n}", "test_large.py dropout"),
        ("group_text.py", 'f"i % 16 + {q}at"', 'f"{q}at"', "test_large.py dropout"),
        ("group_text.py", '("begin", "row") if', '("begin", "0") if', GROUPS),
        ("scatter.cu", "places[e] = id >= 0 && id < length", "places[e] = id < length", ADDED),
        ("scatter.cu", "id >= length) continue", "id >= length) break", ADDED),
        ("tables.cu", "(o * length + id) * inner + k", "(o * length + id) * inner", "test_kernels.py take"),
        (
            "attention.cu",
            "load_rows<D>(key, HEAD(k), k_row",
            "load_rows<D>(key, HEAD(k), q_row",
            "test_attention.py views",
        ),
        ("group_text.py", 'f"i{a} * stride{k}_{a}"', 'f"i{a} * stride{k}_0"', "test_groups.py any_strides"),
    ],
    "threads that meet": [
        ("group_text.py", "if (threadIdx.y == 0 && col < width) {", "if (col < width) {", GROUPS),
        ("many.cu", "if (!finite) *out = false;", "*out = finite;", "test_many.py finite"),
        ("scatter.cu", " || !begins_run(sorted, place, length)", "", IDS),
        ("update.cu", " || !begins_run(sorted, place, length)", "", UPDATED),
        ("channels.cu", "if (threadIdx.y == 0 && part.end)", "if (part.end)", NORM),
    ],
    "precision": [
        ("prelude.cu", " + ((u >> 16) & 1)", "", "test_kernels.py brain"),
        ("warps.cu", "multiply_add(part, left_rest[m], right[n], S());", "", "test_convolution.py rounded"),
        ("tiles.cu", "value = high;", "value = high, rest = 0;", "test_convolution.py rounded"),
        ("warpgroups.cu", "multiply_group(part, left[k], &low", "multiply_group(part, left[k], &high", CONV),
    ],
}
BUGS = [Bug(kind, *bug) for kind, bugs in KINDS.items() for bug in bugs]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        place = copied(Path(made))
        for bug in BUGS:
            if any(words in f"{bug.kind}: {bug.file}: {bug.right}" for words in sys.argv[1:]):
                print(f"== {bug.kind}: {bug.file}: {bug.right} -> {bug.wrong}: {bug.tests}", flush=True)
                ended = found(place, bug)
                words = [line for line in ended.stdout.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
                print(ended.returncode, *words[-4:], ended.stdout.splitlines()[-1], sep="\n", flush=True)
