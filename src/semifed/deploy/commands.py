"""`semifed deploy`: found a federation, start its parties, look at it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from semifed.errors import UserError
from semifed.terminal import say

app = typer.Typer(no_args_is_help=True, help="A federation over a real network, on Flower.")

ServerFolder = Annotated[Path, typer.Argument(metavar="SERVER", help="The server's folder, from `deploy init`.")]


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write everything.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted paths into the recipe.")
    ] = None,
    *,
    recipe: Annotated[str, typer.Option(help="What will be run: a built-in name or a TOML file.")],
    address: Annotated[str, typer.Option(help="host:port at which clients reach the server.")] = "localhost:8443",
    clients: Annotated[str | None, typer.Option(metavar="A,B,C", help="Names of the clients.")] = None,
    classes: Annotated[str | None, typer.Option(metavar="X,Y", help="Names of the known classes.")] = None,
    image: Annotated[str | None, typer.Option(metavar="3,64,64", help="Channels, height, width of images.")] = None,
    port: Annotated[int, typer.Option(help="Of Flower on the server's own machine.")] = 8000,
    sample: Annotated[
        bool, typer.Option("--sample", help="Fill it with the recipe's own data set, for a trial on one machine.")
    ] = False,
) -> None:
    """Write all a consortium needs: keys, certificates, settings, units, a proxy, and a page that explains them."""
    _needs_flower()
    from semifed.deploy.founding import Agreement, fill_with_samples, found, sample_agreement
    from semifed.recipe_file import load_recipe

    given = list(overrides or ())
    loaded = load_recipe(recipe, given)
    if sample:
        agreement = sample_agreement(loaded, address, port)
        found(directory, agreement)
        fill_with_samples(directory, loaded)
    else:
        if clients is None or classes is None or image is None:
            raise UserError(
                "--clients, --classes and --image tell what the parties agreed on; --sample needs none of them"
            )
        members = [name.strip() for name in clients.split(",")]
        sides = [int(side) if side.strip().isdecimal() else 0 for side in image.split(",")]
        if len(sides) != 3 or min(sides) < 1 or sides[0] not in (1, 3):
            raise UserError(f"--image: '{image}' is not three numbers: 1 or 3 channels, height, width")
        given += [f"scenario.clients={len(members)}", "evaluate.unseen=[]"]
        if loaded.clients_per_round is not None and loaded.clients_per_round > len(members):
            given.append(f"clients_per_round={len(members)}")
        shape = (sides[0], sides[1], sides[2])
        names = [name.strip() for name in classes.split(",")]
        found(directory, Agreement(load_recipe(recipe, given), address, port, members, names, shape))
    say(f"written; read {directory / 'README.md'} first")


@app.command()
def server(
    folder: ServerFolder,
    proxy: Annotated[bool, typer.Option("--proxy", help="Start nginx, too: the door for clients elsewhere.")] = False,
) -> None:
    """Start Flower's SuperLink for a federation; it ends with this command."""
    _needs_flower()
    from semifed.deploy.processes import serve

    raise typer.Exit(serve(folder, say, proxy=proxy))


@app.command()
def client(folder: Annotated[Path, typer.Argument(metavar="CLIENT", help="The client's folder.")]) -> None:
    """Start Flower's SuperNode for one client; it ends with this command."""
    _needs_flower()
    from semifed.deploy.processes import join

    raise typer.Exit(join(folder, say))


@app.command()
def run(
    folder: ServerFolder,
    out: Annotated[Path, typer.Option(help="The run directory.")] = Path("runs/federation"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
) -> None:
    """Train with the clients that are there."""
    _needs_flower()
    from semifed.deploy.consortium import server_parts
    from semifed.deploy.processes import run as run_federation

    server_parts(folder)  # mistakes are told here, not in a log
    if not run_federation(folder, out, say, resume=resume):
        raise UserError(f"the run did not finish; what was finished is in {out} (--resume goes on from there)")
    say(f"report: {out / 'report.html'}")


@app.command()
def status(folder: ServerFolder) -> None:
    """Who is connected, and which runs there are."""
    _needs_flower()
    from semifed.deploy.processes import nodes, runs

    table = Table("client", "state", "since")
    for node in nodes(folder):
        table.add_row(node.name, node.state, node.since)
    Console().print(table)
    table = Table("run", "state", "seconds")
    for one in runs(folder):
        table.add_row(str(one["run-id"]), str(one["status"]), f"{float(one['elapsed']):.0f}")
    Console().print(table)


@app.command()
def inspect(
    what: Annotated[str, typer.Argument(metavar="RECIPE|SERVER", help="A recipe, or the server's folder.")],
) -> None:
    """Every tensor and number that travels in a round, with its size."""
    from semifed.assembly import prepare_run
    from semifed.deploy.consortium import CONSORTIUM, server_parts
    from semifed.deploy.inspection import what_travels
    from semifed.recipe_file import load_recipe

    deployed = (Path(what) / CONSORTIUM).is_file()
    parts = server_parts(Path(what)) if deployed else prepare_run(load_recipe(what, []))
    down, up = what_travels(parts)
    for title, sent in (("to a client", down), ("from a client", up)):
        table = Table("name", "shape", "type", "bytes", title=f"{parts.recipe.method['name']}: {title}, each round")
        for one in sent:
            table.add_row(one.name, "x".join(map(str, one.shape)) or "number", one.dtype, f"{one.bytes:,}")
        table.add_row("all", "", "", f"{sum(one.bytes for one in sent):,}")
        Console().print(table)
    say("beside them, to a client: recipe, round, learning rate, class names, image size, mean and deviation of pixels")
    say("beside them, from a client: round, seconds; its losses if client.toml says share = 'losses'")


def _needs_flower() -> None:
    from semifed.engines import flower_engine

    flower_engine()
