"""Small pictures of tensors for the notebooks: who looks at whom, and which token is how likely."""

import torch


def draw_matrices(
    panels: dict[str, torch.Tensor],
    queries: list[str],
    keys: list[str] | None = None,
    axes: tuple[str, str] = ("query", "key"),
) -> None:
    """Draw matrices of weights or masks side by side: a row is a query, a column is a key.

    `panels` maps a title to a matrix [T, S] of numbers from 0 (white) to 1 (dark), or of bools.
    `queries` are the T tokens at the left edge, `keys` the S tokens at the top; without `keys`
    they are the same. `axes` says what a row and what a column is. The numbers are written into
    the cells where they fit: 0 is exactly nothing, 0.00 a little. Raises ValueError for a matrix
    that does not have one row per query and one column per key.
    """
    keys = queries if keys is None else keys
    for title, matrix in panels.items():
        if tuple(matrix.shape) != (len(queries), len(keys)):
            raise ValueError(
                f"the matrix {title!r} has shape {list(matrix.shape)}, but there are "
                f"{len(queries)} queries and {len(keys)} keys: pick one row of the batch and one head"
            )
    plt = _pyplot()
    side = 0.52 * max(len(keys), 4) + 0.9
    size = (side * len(panels), 0.52 * len(queries) + 1.4)
    figure, places = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for ax, (title, matrix) in zip(places[0], panels.items(), strict=True):
        _draw(ax, title, matrix.detach(), queries, keys)
        ax.xaxis.set_label_position("top")
        ax.set_xlabel(f"{axes[1]} →", fontsize=8, color="#777777", labelpad=7)
    places[0, 0].set_ylabel(f"← {axes[0]}", fontsize=8, color="#777777")


def _draw(ax, title: str, matrix: torch.Tensor, queries: list[str], keys: list[str]) -> None:
    """One matrix with its labels."""
    values = matrix.to(torch.float64).numpy()
    ax.imshow(values, cmap="Blues", vmin=0, vmax=1)
    ax.set_title(title, fontsize=10)
    ax.set_xticks(range(len(keys)), keys, rotation=45, ha="left", rotation_mode="anchor")
    ax.set_yticks(range(len(queries)), queries)
    ax.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0, labelsize=9)
    ax.set_xticks([i - 0.5 for i in range(1, len(keys))], minor=True)
    ax.set_yticks([i - 0.5 for i in range(1, len(queries))], minor=True)
    ax.grid(which="minor", color="#dddddd", linewidth=0.6)
    ax.tick_params(which="minor", length=0, top=False)
    if matrix.dtype == torch.bool or len(keys) > 10:
        return
    for row, column in torch.cartesian_prod(
        torch.arange(len(queries)), torch.arange(len(keys))
    ).tolist():
        number = values[row, column]
        color = "white" if number > 0.6 else "#333333"
        text = "0" if number == 0 else f"{number:.2f}"
        ax.text(column, row, text, ha="center", va="center", fontsize=7.5, color=color)


def draw_shares(
    before: torch.Tensor, panels: dict[str, torch.Tensor], words: list[str], top: float = 1.0
) -> None:
    """Draw probabilities [V] as bars, before (grey outline) and after a step (blue), side by side.

    `panels` maps a title to the probabilities [V] after the step. A token that a step has cut, with
    exactly 0 after it, is crossed out. `words` are the V names at the left, `top` is the end of the
    axis. Raises ValueError where the three do not have the same length.
    """
    lengths = {len(before), len(words), *map(len, panels.values())}
    if len(lengths) != 1:
        raise ValueError(
            f"probabilities and words should have one length, but they have {sorted(lengths)}"
        )
    plt = _pyplot()
    size = (2.1 + 2.15 * len(panels), 0.27 * len(words) + 0.8)
    figure, places = plt.subplots(
        1, len(panels), figsize=size, squeeze=False, layout="constrained", sharey=True
    )
    rows = range(len(words))
    for ax, (title, after) in zip(places[0], panels.items(), strict=True):
        ax.barh(rows, after, height=0.7, color="#3b7dd8")
        ax.barh(rows, before, height=0.7, fill=False, edgecolor="#888888", linewidth=1)
        for row, share in enumerate(after.tolist()):
            where = max(share, before[row].item()) + 0.02 * top
            ax.text(where, row, "✗" if share == 0 else f"{share:.3f}", va="center", fontsize=8)
        ax.set(title=title, xlim=(0, 1.28 * top), ylim=(len(words) - 0.4, -0.6), xticks=[])
        ax.title.set_fontsize(10)
        ax.tick_params(length=0)
        ax.spines[["top", "right", "bottom"]].set_visible(False)
    places[0, 0].set_yticks(rows, words)


def _pyplot():
    """matplotlib, asked for only when a picture is drawn: the engine itself runs without it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "the pictures need matplotlib, which is not installed: pip install 'minillm[lab]'"
        ) from error
    return pyplot
