"""Screen every reasoning-gym task: does its scorer pay its own answer, refuse junk, and behave?

    python tests/bench/screen_reasoning_gym.py > screen.json

Each task runs in a process of its own with a time limit. The result is what ``SCREENED`` in
``trl_grpo_ext/rewards/verifiers/reasoning_gym.py`` was made from; run it again for a new version of reasoning-gym.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import subprocess
import sys
import time

NUM_ENTRIES = 6
TIMEOUT_S = 90
MARK = "@@screened@@"
# Never a right answer to anything.
NONSENSE = ("", " ", "\n", "I do not know", "?", "zzqx", "the answer", "\\boxed{}", "[ ]]", "...", "nan", "None", "{}x")
# May be right by chance.
GUESSES = ("0", "1", "-1", "inf", "null", "[]", "{}", "yes", "no", "True", "False", "[[0]]", "x", "0 0", "A", "()")


def near_misses(answer: str) -> list[str]:
    """Return texts that hold the right answer but are wrong: a second answer beside it, a lost sign, a digit more."""
    found = [f"{answer} or 5", f"zzqx {answer} zzqx", f"{answer}, {answer}"]
    try:
        value = float(answer)
    except ValueError:
        return found
    if value:
        found.append(answer[1:] if answer.startswith("-") else f"-{answer}")
    if answer.lstrip("-").isdigit() and value:
        found.append(f"{answer}0")
    return found


def screen(name: str) -> dict[str, object]:
    """Return what the scorer of one task does; runs in the child process."""
    import reasoning_gym
    from reasoning_gym.factory import get_score_answer_fn

    started = time.perf_counter()
    dataset = reasoning_gym.create_dataset(name, size=NUM_ENTRIES, seed=17)
    again = reasoning_gym.create_dataset(name, size=NUM_ENTRIES, seed=17)
    score = get_score_answer_fn(name)
    found: dict[str, object] = {
        "own": [],
        "nonsense": 0.0,
        "guess": 0.0,
        "near": 0.0,
        "texts": {},
        "raised": [],
        "same": True,
    }
    for index in range(NUM_ENTRIES):
        entry = dataset[index]
        found["same"] = bool(found["same"]) and entry["answer"] == again[index]["answer"]
        # What a data set keeps of a row is JSON: tuples become lists and keys become text.
        try:
            entry = json.loads(json.dumps(entry, default=str))
        except TypeError:
            found["not_json"] = True
            entry = dict(entry)
        found["own"].append(_call(score, entry["answer"], entry, found))  # type: ignore[attr-defined]
        for kind, texts in (
            ("nonsense", NONSENSE),
            ("guess", GUESSES),
            ("near", near_misses(str(entry["answer"]))),
        ):
            for text in texts:
                value = _call(score, text, entry, found)
                if value is not None and text.strip() != str(entry["answer"]).strip() and not value <= found[kind]:  # type: ignore[operator]
                    found[kind] = value if math.isfinite(value) else 9.0
                    found["texts"][kind] = text  # type: ignore[index]
    found["seconds"] = round(time.perf_counter() - started, 2)
    found["answer"] = str(dataset[0]["answer"])[:80]
    return found


def _call(score, answer, entry, found):  # type: ignore[no-untyped-def]
    try:
        return float(score(answer, entry))
    except Exception as error:
        kinds = found["raised"]
        text = f"{type(error).__name__} for {str(answer)[:20]!r}"
        if len(kinds) < 5 and text not in kinds:
            kinds.append(text)
        return None


def main() -> None:
    """Screen all tasks and print the result as JSON."""
    if len(sys.argv) > 1:
        print(MARK + json.dumps(screen(sys.argv[1])))
        return
    import reasoning_gym

    result: dict[str, object] = {"version": importlib.metadata.version("reasoning-gym")}
    for name in sorted(reasoning_gym.factory.DATASETS):
        try:
            run = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=TIMEOUT_S)
            _, mark, found = run.stdout.rpartition(MARK)  # some tasks print on their own
            result[name] = json.loads(found) if run.returncode == 0 and mark else (run.stderr or run.stdout)[-300:]
        except subprocess.TimeoutExpired:
            result[name] = f"longer than {TIMEOUT_S} s"
        print(name, result[name], file=sys.stderr)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
