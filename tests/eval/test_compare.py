"""Videos of others: files, folders of frames and folders of videos, and what cannot be compared."""

import json
import math
import os
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from skimage.metrics import peak_signal_noise_ratio

from quantwm_core.errors import FormatError, ParameterError
from quantwm_eval import cli, compare, film, footage, metrics
from quantwm_eval.evidence import Evidence, Frames
from quantwm_eval.metric import Measurement, Metric, Quantity
from tests.eval.test_film import picture_book


def noisy(frames: Frames, seed: int = 0) -> Frames:
    drawn = np.random.default_rng(seed).normal(0, 9, frames.shape)
    return (frames + drawn).clip(0, 255).astype(np.uint8)


def save_frames(folder: Path, frames: Frames, first: int = 0) -> Path:
    folder.mkdir(parents=True)
    for number, picture in enumerate(frames, first):
        PIL.Image.fromarray(picture).save(folder / f"frame_{number}.png")
    return folder


def save_film(path: Path, frames: Frames, rate: int = 8) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(film.encode(frames, rate))
    return path


A = film.enlarge(picture_book(19), 2)
B = noisy(A)
NAMES = [name for name in compare.names() if metrics.get(name).installed]


def scored(first: Path, second: Path) -> compare.Score:
    (pair,) = compare.match(first, second)
    return compare.score(pair, NAMES)


def test_frames_in_folders_score_as_the_arrays_do_to_the_bit(tmp_path: Path) -> None:
    found = scored(save_frames(tmp_path / "a", B), save_frames(tmp_path / "b", A))
    assert found.frames == len(A) > 2 * compare.BLOCK
    for name in NAMES:
        whole = metrics.get(name).measure(Evidence(B, A))
        for quantity, value in whole.values.items():
            assert found.measurement.values[quantity] == value
        for quantity, curve in whole.curves.items():
            np.testing.assert_array_equal(found.measurement.curves[quantity], curve)
    assert found.measurement.values["psnr"] == pytest.approx(peak_signal_noise_ratio(A, B, data_range=255), abs=1e-9)
    alone = metrics.get("temporal_flickering").measure(Evidence(A)).values
    assert found.of_reference == alone != {"temporal_flickering": found.measurement.values["temporal_flickering"]}


def test_a_frame_without_a_number_among_others_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbered = save_frames(tmp_path / "numbered", A[:3])
    (numbered / "frame_1.png").rename(numbered / "frame.png")
    status, told = refused(numbered, numbered, capsys)
    assert status == 1
    assert "frame.png: has no number" in told
    (tmp_path / "named").mkdir()
    for name, picture in zip("cab", A[[2, 0, 1]], strict=True):
        PIL.Image.fromarray(picture).save(tmp_path / "named" / f"{name}.png")
    np.testing.assert_array_equal([*footage.find(tmp_path / "named")[""].frames()], A[:3])


def test_frames_are_taken_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    (found,) = footage.find(save_frames(tmp_path / "a", A, first=8)).values()
    np.testing.assert_array_equal(np.stack(list(found.frames())), A)


def test_files_are_decoded_as_our_own_decoder_does(tmp_path: Path) -> None:
    big = film.enlarge(A, 2)
    path = save_film(tmp_path / "a.mp4", big)
    (found,) = footage.find(path).values()
    np.testing.assert_array_equal(np.stack(list(found.frames())), film.decode(path.read_bytes()))
    assert found.rate == 8
    same = scored(path, path).measurement.values
    assert (same["psnr"], same["ssim"], same["excess_flicker_max"]) == (math.inf, 1.0, 0.0)


def test_a_film_may_be_compared_with_frames(tmp_path: Path) -> None:
    big = film.enlarge(A, 2)
    found = scored(save_film(tmp_path / "a.mp4", big), save_frames(tmp_path / "b", big))
    assert 33 < found.measurement.values["psnr"] < math.inf


def test_folders_are_matched_by_name(tmp_path: Path) -> None:
    for side, add in (("a", 1), ("b", 2)):
        save_film(tmp_path / side / "one.mp4", noisy(A, add))
        save_frames(tmp_path / side / "two", noisy(A, 10 * add))
    (tmp_path / "a" / "notes.txt").write_text("seen")
    pairs = compare.match(tmp_path / "a", tmp_path / "b")
    assert [pair.name for pair in pairs] == ["one", "two"]
    scores = [compare.score(pair, NAMES) for pair in pairs]
    text = compare.table(scores, NAMES).splitlines()
    mean = sum(one.measurement.values["psnr"] for one in scores) / 2
    (row,) = (line for line in text if line.startswith("mean, n = 2"))
    assert f"{mean:.2f}" in row.split()
    assert text[-1].startswith("95 % interval")


def test_one_frame_has_no_flicker_and_the_rest_stands(tmp_path: Path) -> None:
    values = scored(save_frames(tmp_path / "a", A[:1]), save_frames(tmp_path / "b", B[:1])).measurement.values
    assert math.isnan(values["excess_flicker"])
    assert math.isnan(values["temporal_flickering"])
    assert 0 < values["psnr"] < math.inf


def test_a_third_partys_metric_of_whole_videos_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(evidence: Evidence) -> Measurement:
        assert evidence.reference is not None
        return Measurement({"sum": float(evidence.video.sum()) - float(evidence.reference.sum())})

    theirs = Metric("sum", (Quantity("sum", "Sum", "", "neither"),), ("reference",), measure)
    known = metrics.get
    monkeypatch.setattr(metrics, "get", lambda name: theirs if name == "sum" else known(name))
    (pair,) = compare.match(save_frames(tmp_path / "a", B), save_frames(tmp_path / "b", A))
    values = compare.score(pair, ["sum", "psnr"]).measurement.values
    assert list(values) == ["sum", "psnr"]
    assert values["sum"] == float(B.sum()) - float(A.sum())


def test_the_command_prints_a_table_and_writes_strict_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save_frames(tmp_path / "a", B), save_frames(tmp_path / "b", A)
    out = tmp_path / "scores.json"
    assert cli.main(["compare", str(a), str(b), "--out", str(out), "--metrics", "psnr,excess_flicker"]) == 0
    told = capsys.readouterr()
    assert "PSNR, dB ↑" in told.out.splitlines()[0]
    assert told.err == ""
    written = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert (written["format"], written["version"]) == ("quantwm-scores", 1)
    assert set(written["pairs"][0]["values"]) == {"psnr", "excess_flicker", "excess_flicker_max"}
    assert len(written["pairs"][0]["curves"]["excess_flicker"]) == len(A) - 1
    assert "numpy" in written["provenance"]["versions"]
    assert cli.main(["compare", str(a), str(b), "--out", str(out)]) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert cli.main(["compare", str(a), str(a), "--out", str(out), "--overwrite"]) == 0
    assert json.loads(out.read_text())["pairs"][0]["values"]["psnr"] == "Infinity"


def test_figures_are_printed_where_they_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, out = save_frames(tmp_path / "a", A), tmp_path / "scores.json"
    given = ["compare", str(a), str(a), "--metrics", "psnr", "--out"]
    assert cli.main([*given, str(out.with_name("x" * 300))]) == 2  # no file system takes such a name
    told = capsys.readouterr()
    assert "cannot be written: File name too long; name another file" in told.err
    assert told.out == ""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantwm_core.tensor_file.os.fsync", full)
    assert cli.main([*given, str(out)]) == 1
    told = capsys.readouterr()
    assert "PSNR, dB" in told.out
    assert f"--out {out}: cannot be written: No space left on device" in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_no_input_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save_film(tmp_path / "a.mp4", A), save_film(tmp_path / "b.mp4", B)
    still = save_frames(tmp_path / "frames", A) / "frame_3.png"
    many = save_film(tmp_path / "many" / "x.mp4", A)
    (tmp_path / "link").symlink_to(a)
    (tmp_path / "twin").hardlink_to(b)
    for first, second, out in (
        (a, b, a),
        (a, b, b),
        (a, b, tmp_path / "frames" / ".." / "a.mp4"),
        (a, b, tmp_path / "link"),
        (a, b, tmp_path / "twin"),
        (still.parent, b, still),
        (many.parent, many.parent, many),
    ):
        before = out.read_bytes()
        given = [str(first), str(second), "--metrics", "psnr", "--out", str(out), "--overwrite"]
        assert cli.main(["compare", *given]) == 2
        assert "an input itself" in capsys.readouterr().err
        assert out.read_bytes() == before


def test_processes_change_no_figure_and_failures_are_told_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3):
        save_frames(tmp_path / "ours" / f"{index}", noisy(A[:4], index))
        save_frames(tmp_path / "theirs" / f"{index}", A[:4])
    given = ["compare", str(tmp_path / "ours"), str(tmp_path / "theirs")]
    assert cli.main([*given, "--jobs", "1"]) == 0
    alone = capsys.readouterr().out
    before = os.environ.copy()
    assert cli.main([*given, "--jobs", "2"]) == 0
    assert capsys.readouterr().out == alone
    assert os.environ == before
    (tmp_path / "theirs" / "1" / "frame_2.png").write_bytes(b"no picture")
    assert cli.main([*given, "--jobs", "2"]) == 1
    assert "frame_2.png: not a picture" in capsys.readouterr().err


def refused(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main(["compare", str(first), str(second)])
    told = capsys.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err
    return status, told.err


def test_what_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, short = save_frames(tmp_path / "whole", A), save_frames(tmp_path / "short", A[:-3])
    small = save_frames(tmp_path / "small", A[:, :-2])
    slow, fast = save_film(tmp_path / "slow.mp4", A, 4), save_film(tmp_path / "fast.mp4", A, 8)
    tiny = save_frames(tmp_path / "tiny", A[:, :10])
    for first, second, wanted in (
        (whole, short, "19 frames, "),
        (short, whole, "cut one of them"),
        (whole, small, "48 x 32"),
        (slow, fast, "4 frames a second"),
        (tiny, tiny, "LPIPS by alexnet needs 31 x 31"),
    ):
        status, told = refused(first, second, capsys)
        assert status == 1
        assert wanted in told


def test_what_is_not_there_or_not_alone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    film_file, many = save_film(tmp_path / "one.mp4", A), tmp_path / "many"
    save_film(many / "x.mp4", A)
    save_film(many / "y.mp4", A)
    fewer = tmp_path / "fewer"
    save_film(fewer / "x.mp4", A)
    mixed = save_frames(tmp_path / "mixed", A[:2])
    save_film(mixed / "x.mp4", A)
    twins = tmp_path / "twins"
    save_film(twins / "x.mp4", A)
    (tmp_path / "empty").mkdir()
    for first, second, wanted in (
        (tmp_path / "absent.mp4", film_file, "no such file"),
        (film_file, many, "name two videos or two folders"),
        (many, fewer, "'y' of "),
        (fewer, many, "'y' of "),
        (mixed, mixed, "pictures and videos"),
        (tmp_path / "empty", many, "holds no video"),
    ):
        status, told = refused(first, second, capsys)
        assert status == 2
        assert wanted in told
    (twins / "x.mkv").write_bytes(b"")
    with pytest.raises(FormatError, match="bear one name"):
        footage.find(twins)


def test_unreadable_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = save_film(tmp_path / "good.mp4", A)
    foreign = tmp_path / "foreign.mp4"
    foreign.write_bytes(b"no video at all" * 50)
    frames = save_frames(tmp_path / "frames", A)
    (frames / "frame_3.png").write_bytes((frames / "frame_3.png").read_bytes()[:60])
    odd = save_frames(tmp_path / "odd", A)
    PIL.Image.fromarray(A[0, :8]).save(odd / "frame_5.png")
    for path, wanted in (
        (foreign, "foreign.mp4: not a video"),
        (frames, "frame_3.png: not a picture"),
        (odd, "frame_5.png: 48 x 8, the frames before it are 48 x 32"),
    ):
        for order in ((path, good), (good, path)):
            status, told = refused(*order, capsys)
            assert status == 1
            assert wanted in told


def test_metrics_that_need_more_than_pictures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_frames(tmp_path / "a", A[:2])
    assert cli.main(["compare", str(path), str(path), "--metrics", "memory"]) == 2
    assert "needs more than pictures (cache)" in capsys.readouterr().err
    (pair,) = compare.match(path, path)
    with pytest.raises(ParameterError, match="memory"):
        compare.score(pair, ["memory"])
    with pytest.raises(SystemExit):
        cli.main(["compare", str(path), str(path), "--metrics", "pnsr"])
    assert "did you mean 'psnr'" in capsys.readouterr().err


def test_a_metric_that_is_not_installed_is_left_out_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_frames(tmp_path / "a", A[:2])
    lacking = Metric(
        "ssim", (Quantity("ssim", "SSIM", "", "higher"),), (), lambda _: Measurement({}), module="no_such_module"
    )
    known = metrics.get
    monkeypatch.setattr(metrics, "get", lambda name: lacking if name == "ssim" else known(name))
    assert cli.main(["compare", str(path), str(path)]) == 0
    told = capsys.readouterr()
    assert "left out: ssim (needs the module no_such_module)" in told.err
    assert "SSIM" not in told.out
    assert cli.main(["compare", str(path), str(path), "--metrics", "ssim"]) == 2
    assert not lacking.applies(Evidence(A))
