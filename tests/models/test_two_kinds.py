"""What one stored stream means to queries of two kinds."""

import torch
from torch import Tensor

from quantwm_kernels.statistics import second_moment
from quantwm_models.rotary import turned
from quantwm_models.two_kinds import Transforms, stored_once
from tests.models.chunks import normal
from tests.models.hy_world_host import CHANNELS, FRAME, Scene, apply_rotary_emb, prope_qkv, scene


def transforms(place: Scene) -> Transforms:
    def rotate(keys: Tensor) -> Tensor:
        by_token = keys.transpose(1, 2)
        return apply_rotary_emb(by_token, by_token, place.rotation)[1].transpose(1, 2)

    def project(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        _, keys, values, _ = prope_qkv(keys, keys, values, viewmats=place.views)
        return keys, values

    return Transforms(rotate, project, place.views.shape[1])


def test_the_moment_weighs_an_error_as_the_queries_of_both_kinds_see_it() -> None:
    frames = 3
    place, tokens = scene(torch.arange(frames)), frames * FRAME
    host = transforms(place)
    keys, roped, projected = normal(3, 1, 2, tokens, CHANNELS, seed=3)
    empty = torch.zeros_like(roped)
    queries = torch.cat([torch.cat([roped, empty], dim=-1), torch.cat([empty, projected], dim=-1)], dim=2)
    angles = host.angles(keys)
    assert angles is not None
    moment = host.frame(second_moment(queries, 2), angles)
    error = torch.linspace(-1, 1, CHANNELS)
    errors = error.expand(1, 2, tokens, CHANNELS)
    matrices = host.matrices(keys).repeat_interleave(FRAME, dim=1)[:, None]
    after_projection = (matrices @ errors.unflatten(-1, (-1, 4)).mT).mT.flatten(-2)
    seen = [
        (queries_of_kind.float() @ after.mT).square().mean(dim=(-1, -2))
        for queries_of_kind, after in ((roped, turned(errors, angles)), (projected, after_projection))
    ]
    # Half of the queries are of each kind.
    expected = (seen[0] + seen[1]) / 2
    torch.testing.assert_close(torch.einsum("i,bhij,j->bh", error, moment.mean, error), expected, rtol=1e-4, atol=0)


def test_matrices_are_those_that_keys_are_multiplied_by() -> None:
    place = scene(torch.arange(4))
    keys = normal(1, 2, 4 * FRAME, CHANNELS)
    matrices = transforms(place).matrices(keys)
    tiles = keys.float().unflatten(-1, (-1, 4)).unflatten(2, (4, FRAME))
    expected = torch.einsum("bcij,bhcntj->bhcnti", matrices, tiles).flatten(-2).flatten(2, 3)
    got = transforms(place).project(keys, keys)[0]
    torch.testing.assert_close(got.float(), expected, rtol=0.01, atol=0.02)


def test_it_is_stored_once_only_if_the_bits_are_the_same() -> None:
    host = transforms(scene(torch.arange(2)))
    keys, values = normal(2, 1, 2, 2 * FRAME, CHANNELS)
    made = host.both(keys, values)
    stored = stored_once(host, (keys, values), made)
    assert stored is not None
    assert torch.equal(stored[0], keys)
    for half in (0, 1):
        other = [each.clone() for each in made]
        other[half].view(torch.int16)[0, 1, 3, 2] ^= 1
        assert stored_once(host, (keys, values), (other[0], other[1])) is None
    # BF16 does not hold what FP32 did.
    wide = Transforms(host.rotate, lambda keys, values: (2 * keys, 2 * values), 2, torch.float32)
    raw = (1.001 * keys.float(), values.float())
    assert stored_once(wide, raw, wide.both(*raw)) is None
    raw = (keys.float(), values.float())
    assert stored_once(wide, raw, wide.both(*raw)) is not None


def test_keys_that_are_turned_otherwise_have_no_angles() -> None:
    place = scene(torch.arange(2))
    host = Transforms(lambda keys: keys.roll(1, dims=-1), transforms(place).project, 2)
    assert host.angles(normal(1, 2, 2 * FRAME, CHANNELS)) is None
