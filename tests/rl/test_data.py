"""Prompt files: formats, every kind of bad row, weights, order and cursor."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_lora.errors import DataError
from glm_lora.rl.data import load_prompts
from glm_lora.rl.stream import PromptStream, request_seed


def encode(prompt):
    text = prompt if isinstance(prompt, str) else "|".join(m["content"] for m in prompt)
    return [ord(c) for c in text]


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def numbered(path, count, tag="p"):
    return write(path, [{"prompt": f"{tag}{i}", "label": str(i)} for i in range(count)])


def test_jsonl_and_parquet_give_the_same(tmp_path):
    rows = [
        {"prompt": "1+1", "label": "2", "metadata": {"level": 1}},
        {"prompt": "2+2", "label": "4", "metadata": {"level": 2}},
    ]
    text = write(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    one = load_prompts([text], encode).files[0].prompts
    two = load_prompts([str(tmp_path / "a.parquet")], encode).files[0].prompts
    assert [(p.ids, p.prompt, p.label, p.metadata) for p in one] == [
        (p.ids, p.prompt, p.label, p.metadata) for p in two
    ]
    assert one[1].ids == tuple(map(ord, "2+2"))
    assert one[1].source == f"{text}:2" and two[1].source.endswith("a.parquet:2")


def test_messages_and_other_keys(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows = [{"messages": messages, "answer": 7, "info": {"k": [1]}}]
    for path in (tmp_path / "m.jsonl", tmp_path / "m.parquet"):
        if path.suffix == ".jsonl":
            write(path, rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        keys = {"input_key": "messages", "label_key": "answer", "metadata_key": "info"}
        prompt = load_prompts([str(path)], encode, **keys).files[0].prompts[0]
        assert prompt.prompt == tuple(messages) and prompt.text == "q"
        assert prompt.label == "7" and prompt.metadata == {"k": [1]}


BAD = {
    '{"prompt": "x", "label": ': "invalid JSON",
    '["x"]': "the row is a list, not an object",
    '{"label": "1"}': "missing key 'prompt' (it has label)",
    '{"prompt": null, "label": "1"}': "'prompt' is null",
    '{"prompt": "x"}': "missing key 'label'",
    '{"prompt": "x", "label": " "}': "the label is empty",
    '{"prompt": "x", "label": true}': "'label' is a truth value",
    '{"prompt": "x", "label": ["1"]}': "'label' is a list",
    '{"prompt": "x", "label": "bad"}': "cannot be used: no bad labels",
    '{"prompt": " ", "label": "1"}': "the prompt is empty",
    '{"prompt": 3, "label": "1"}': "'prompt' is a number",
    '{"prompt": [], "label": "1"}': "no message",
    '{"prompt": ["x"], "label": "1"}': "a message is not an object",
    '{"prompt": [{"role": "user"}], "label": "1"}': "a message is not an object",
    '{"prompt": [{"role": "User", "content": "x"}], "label": "1"}': "role 'User'",
    '{"prompt": [{"role": "assistant", "content": "x"}], "label": "1"}': "the assistant's",
    '{"prompt": "x", "label": "1", "metadata": 3}': "'metadata' is a number",
    '{"prompt": "much too long", "label": "1"}': "13 tokens after the chat template",
    "\xff": "not UTF-8",
}


def check_label(label):
    return "no bad labels" if label == "bad" else None


OPTIONS = {"check_label": check_label, "max_prompt_tokens": 12}


def bad_file(path):
    lines = ['{"prompt": "ok", "label": "1"}', "", *BAD, '{"prompt": "fine", "label": "2"}']
    path.write_bytes("\n".join(lines).encode("latin-1"))
    return str(path)


@pytest.mark.parametrize("line", BAD)
def test_each_bad_row_names_file_line_and_reason(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "ok", "label": "1"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError) as error:
        load_prompts([str(path)], encode, **OPTIONS)
    assert f"{path}:3: " in str(error.value) and BAD[line] in str(error.value)
    assert error.value.exit_code == 2


def test_whole_numbers_in_a_column_of_floats_are_labels_as_they_were_meant(tmp_path):
    path = tmp_path / "gap.parquet"
    values = [1.0, float("nan"), None, 2.5, -3.0, float("inf"), 1e300]
    table = pa.table({"prompt": list("abcdefg"), "label": pa.array(values, pa.float64())})
    pq.write_table(table, path)
    data = load_prompts([str(path)], encode, skip_bad_rows=True)
    assert [p.label for p in data.files[0].prompts] == ["1", "2.5", "-3", "1e+300"]
    assert [(b.file, b.row) for b in data.bad_rows] == [(str(path), row) for row in (2, 3, 6)]
    rows = [{"prompt": "a", "label": value} for value in (5.0, float("nan"), float("-inf"))]
    text = write(tmp_path / "whole.jsonl", rows)
    data = load_prompts([text], encode, skip_bad_rows=True)
    assert [p.label for p in data.files[0].prompts] == ["5"]
    assert [str(b) for b in data.bad_rows] == [
        f"{text}:2: 'label' is nan, which is no label",
        f"{text}:3: 'label' is -inf, which is no label",
    ]


def never(name):
    """A column that Python has no dates for."""
    return pa.field(name, pa.timestamp("s")), pa.array([2**40], pa.timestamp("s"))


def parquet(path, *columns, **texts):
    """One row; ``columns`` are fields with their values, ``texts`` are text columns."""
    fields = [*columns, *((pa.field(k, pa.string()), pa.array([v])) for k, v in texts.items())]
    schema = pa.schema([field for field, _ in fields])
    pq.write_table(pa.Table.from_arrays([array for _, array in fields], schema=schema), path)
    return str(path)


def test_a_column_that_is_not_used_may_hold_anything(tmp_path):
    path = parquet(tmp_path / "a.parquet", never("when"), prompt="x", label="1")
    assert len(load_prompts([path], encode)) == 1


def test_parquet_files_that_cannot_be_used(tmp_path):
    path = parquet(tmp_path / "late.parquet", never("label"), prompt="x")
    with pytest.raises(DataError, match=r"late\.parquet cannot be read"):
        load_prompts([path], encode)
    twice = (pa.field("label", pa.string()), pa.array(["2"]))
    path = parquet(tmp_path / "twice.parquet", twice, prompt="x", label="1")
    with pytest.raises(DataError, match=r"twice\.parquet has the column 'label' twice"):
        load_prompts([path], encode)
    path = parquet(tmp_path / "without.parquet", prompt="x", answer="1")
    with pytest.raises(DataError, match=r"no column 'label' \(it has prompt, answer\)"):
        load_prompts([path], encode)


def test_a_file_of_bad_rows_only_says_why(tmp_path):
    good = numbered(tmp_path / "good.jsonl", 2)
    bad = write(tmp_path / "bad.jsonl", [{"prompt": "x"}] * 3)
    with pytest.raises(DataError) as error:
        load_prompts([bad_file(tmp_path / "some.jsonl"), good, bad], encode, skip_bad_rows=True)
    text = str(error.value)
    assert "bad.jsonl has no usable prompt" in text and "bad.jsonl:3: missing key 'label'" in text
    assert "some.jsonl" not in text


def test_all_bad_rows_of_all_files_are_in_one_report(tmp_path):
    one, two = bad_file(tmp_path / "one.jsonl"), bad_file(tmp_path / "two.jsonl")
    with pytest.raises(DataError) as error:
        load_prompts([one, two], encode, **OPTIONS)
    text = str(error.value)
    assert f"{2 * len(BAD)} prompt rows" in text and f"and {2 * len(BAD) - 20} more" in text
    assert one in text and two in text and "--skip-bad-rows" in text


def test_skipping_counts_exactly(tmp_path):
    data = load_prompts([bad_file(tmp_path / "x.jsonl")], encode, skip_bad_rows=True, **OPTIONS)
    assert [p.prompt for p in data.files[0].prompts] == ["ok", "fine"]
    assert len(data) == 2 and len(data.bad_rows) == len(BAD)
    assert [b.row for b in data.bad_rows] == list(range(3, 3 + len(BAD)))


def test_unusable_files(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        load_prompts([str(tmp_path / "none.jsonl")], encode)
    with pytest.raises(DataError, match="does not exist"):
        load_prompts([str(tmp_path)], encode)
    with pytest.raises(DataError, match="no usable prompt"):
        load_prompts([write(tmp_path / "empty.jsonl", [])], encode)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is no parquet file PAR1")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be read"):
        load_prompts([str(tmp_path / "broken.parquet")], encode)
    (tmp_path / "a.csv").write_text("prompt,label\n")
    with pytest.raises(DataError, match="unknown kind"):
        load_prompts([str(tmp_path / "a.csv")], encode)
    for nothing in ([], [""]):
        with pytest.raises(DataError, match="no prompt file"):
            load_prompts(nothing, encode)


def test_weights(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", 3, "a"), numbered(tmp_path / "b.jsonl", 9, "b")
    for sources, share in (
        ([a, b], 0.25),
        ([f"{a}@3", f"{b}@1"], 0.75),
        ([f"{a}@0.5", f"{b}@0.5"], 0.5),
    ):
        stream = PromptStream(load_prompts(sources, encode), shuffle=True, seed=0)
        seen = 0
        for drawn in range(1, 201):
            seen += stream.take(1)[0].prompt.startswith("a")
            assert abs(seen - share * drawn) <= 1
    for sources in ([f"{a}@0", f"{b}@1"], [f"{a}@-1", f"{b}@1"], [f"{a}@inf", b], [f"{a}@2", b]):
        with pytest.raises(DataError, match="weight"):
            load_prompts(sources, encode)


def test_a_path_may_contain_an_at_sign(tmp_path):
    path = numbered(tmp_path / "set@2.jsonl", 2)
    assert load_prompts([path], encode).files[0].path.name == "set@2.jsonl"
    assert load_prompts([f"{path}@4"], encode).files[0].weight == 4


def test_every_epoch_deals_every_prompt_once(tmp_path):
    data = load_prompts([numbered(tmp_path / "a.jsonl", 7)], encode)
    stream = PromptStream(data, shuffle=True, seed=3)
    epochs = [[p.label for p in stream.take(7)] for _ in range(4)]
    assert all(sorted(e) == [str(i) for i in range(7)] for e in epochs)
    assert len({tuple(e) for e in epochs}) > 1
    assert stream.epoch == 4
    again = PromptStream(data, shuffle=True, seed=3)
    assert [p.label for p in again.take(28)] == [label for e in epochs for label in e]
    other = PromptStream(data, shuffle=True, seed=4)
    assert [p.label for p in other.take(7)] != epochs[0]
    plain = PromptStream(data, shuffle=False, seed=3)
    assert [p.label for p in plain.take(9)] == list("012345601")


def test_a_batch_may_be_larger_than_the_file(tmp_path):
    data = load_prompts([numbered(tmp_path / "a.jsonl", 2)], encode)
    assert Counter(p.label for p in PromptStream(data, shuffle=True, seed=0).take(7)) in (
        {"0": 4, "1": 3},
        {"0": 3, "1": 4},
    )


def test_the_cursor_resumes_exactly(tmp_path):
    sources = [
        f"{numbered(tmp_path / 'a.jsonl', 5, 'a')}@2",
        f"{numbered(tmp_path / 'b.jsonl', 8, 'b')}@1",
    ]
    whole = PromptStream(load_prompts(sources, encode), shuffle=True, seed=1)
    expected = [p.prompt for p in whole.take(60)]
    for cut in (0, 1, 5, 31, 59):
        first = PromptStream(load_prompts(sources, encode), shuffle=True, seed=1)
        first.take(cut)
        state = json.loads(json.dumps(first.state_dict()))
        second = PromptStream(load_prompts(sources, encode), shuffle=True, seed=1)
        second.load_state_dict(state)
        assert [p.prompt for p in second.take(60 - cut)] == expected[cut:]


def test_a_cursor_of_something_else_is_refused(tmp_path):
    data = load_prompts([numbered(tmp_path / "a.jsonl", 5)], encode)
    state = PromptStream(data, shuffle=True, seed=1).state_dict()
    for other, what in (
        (PromptStream(data, shuffle=True, seed=2), "seed"),
        (PromptStream(data, shuffle=False, seed=1), "shuffling"),
        (
            PromptStream(
                load_prompts([numbered(tmp_path / "b.jsonl", 6)], encode), shuffle=True, seed=1
            ),
            "prompt data",
        ),
    ):
        with pytest.raises(DataError, match=f"another {what}"):
            other.load_state_dict(state)


def test_request_seeds_differ():
    seeds = {request_seed(s, r, i) for s in range(3) for r in range(20) for i in range(16)}
    assert len(seeds) == 3 * 20 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.recursive(
                st.none() | st.booleans() | st.floats() | st.text(max_size=5),
                lambda x: (
                    st.lists(x, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(["prompt", "label", "metadata", "role", "content"]), x
                    )
                ),
                max_leaves=8,
            ).map(lambda row: json.dumps(row).encode()),
            max_size=4,
        ).map(b"\n".join),
    )
)
def test_fuzz_any_file_is_read_or_refused(tmp_path, content):
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(content)
    try:
        data = load_prompts([str(path)], encode, skip_bad_rows=True)
    except DataError as error:
        assert "no usable prompt" in str(error)
    else:
        assert all(p.ids and p.label.strip() for f in data.files for p in f.prompts)
