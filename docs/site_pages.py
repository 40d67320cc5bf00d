"""What mkdocs asks while it builds the site: the pages of the API, and the order of all pages.

Neither is kept anywhere: the API is that of ``rlkernel/__init__.py``, the order that of the landing page.
"""

import ast
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Public names that belong to no op: the module that they come from, and the page that tells about them.
OTHERS = {
    "rlkernel._explain": "backends",
    "rlkernel._frameworks": "frameworks",
    "rlkernel._warm_up": "backends",
    "rlkernel.consistency": "consistency",
    "rlkernel.dispatch": "backends",
    "rlkernel.prefix": "prefix_shared_attention",
    "rlkernel.routing_replay": "routing_replay",
    "rlkernel.runtime": "backends",
}
TITLES = {
    "backends": "Backends, memory, checks",
    "frameworks": "Frameworks",
    "testing": "Assertions for tests",
}
# What a public name stands for, where its own docstring points to another.
# A public module that is not loaded by ``import rlkernel``.
APART = {"testing": "rlkernel.testing"}
BEHIND = {
    "patch_areal": "rlkernel.integrations.areal.patch",
    "patch_axolotl": "rlkernel.integrations.axolotl.patch",
    "patch_swift": "rlkernel.integrations.swift.patch",
    "patch_deepspeed": "rlkernel.integrations.deepspeed.patch",
    "patch_llamafactory": "rlkernel.integrations.llamafactory.patch",
    "patch_openrlhf": "rlkernel.integrations.openrlhf.patch",
    "patch_skyrl": "rlkernel.integrations.skyrl.patch",
    "patch_trl": "rlkernel.integrations.trl.patch",
    "patch_verl": "rlkernel.integrations.verl.patch",
    "patch_vllm": "rlkernel.integrations.vllm.patch",
    "register_hf": "rlkernel.integrations.hf.register_hf",
    "packed_logprobs": "rlkernel.integrations.hf.packed_logprobs",
}


def on_files(files, config):
    for page, names in api().items():
        text = "\n\n".join([f"# {TITLES.get(page, page)}", guide(page), *map(directive, names)])
        files.append(File.generated(config, f"api/{page}.md", content=text))
    config.nav = navigation((Path(config.docs_dir) / "index.md").read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown, page, config, files):
    """The page of an op, or a guide with pages of its own in the API, leads there."""
    path = page.file.src_uri
    name = path.rpartition("/")[2].removesuffix(".md")
    if path.startswith("api/") or not (guide_of(name) == path and f"api/{name}.md" in files.src_uris):
        return markdown
    title, _, rest = markdown.partition("\n")
    up = "../" * path.count("/")
    names = ", ".join(f"[`{n.rpartition('.')[2]}`]({up}api/{name}.md#{n})" for n in api()[name])
    return f"{title}\n\nSignatures and docstrings: {names}\n{rest}"


def on_page_content(html, **_):
    """A number breaks nowhere; a browser would do so at the minus of 1e-07."""
    return re.sub(r"<td>([-+]?\d[\w.%+-]*)</td>", r'<td class="number">\1</td>', html)


def guide_of(page):
    """The page of docs/ that explains what a page of the API lists."""
    places = [f"ops/{page}.md", f"{page}.md", "dispatch.md" if page == "backends" else ""]
    return next((place for place in places if place and (ROOT / "docs" / place).is_file()), "")


def guide(page):
    place = guide_of(page)
    if not place:
        return ""
    title = (ROOT / "docs" / place).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return f"What it is for, and what it promises: [{title}](../{place})."


def directive(name):
    lines = [f"::: {name}"]
    if behind := BEHIND.get(name.rpartition(".")[2]):
        lines += ["", f"::: {behind}"]
    return "\n".join(lines)


def api():
    """The names of each page: those of ``rlkernel.__all__``, and what is loaded when it is asked for."""
    tree = ast.parse((ROOT / "rlkernel/__init__.py").read_text(encoding="utf-8"))
    sources = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if is_module(node, alias) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }
    (public,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    pages = {}
    for name in sorted({*public, *sources} - {"TYPE_CHECKING", "Any"}, key=order):
        if name in sources:  # and not __version__
            pages.setdefault(page_of(sources[name]), []).append(f"rlkernel.{name}")
    for page, name in APART.items():
        pages[page] = [name]
    for page, names in pages.items():
        names.sort(key=lambda name: name != f"rlkernel.{page}")  # the op's own name first
    return {page: pages[page] for page in sorted(pages, key=lambda page: (not is_op(page), page))}


def order(name):
    return (name.isupper(), not name.islower(), name)


def is_op(page):
    return (ROOT / "docs/ops" / f"{page}.md").is_file()


def is_module(node, alias):
    place = ROOT / node.module.replace(".", "/") / alias.name
    return place.is_dir() or place.with_suffix(".py").is_file()


def page_of(module):
    parts = module.split(".")
    if parts[1] in ("ops", "calls"):
        return parts[2]
    return OTHERS[".".join(parts[:2])]


def navigation(landing):
    """The landing page's headings and links as mkdocs' nav; then the API."""
    nav, section, group = [{"Home": "index.md"}], None, None
    for line in landing.splitlines():
        if heading := re.match(r"(##+) (.+)", line):
            if len(heading[1]) == 2:
                section = group = []
                nav.append({heading[2]: section})
            elif section is not None:
                group = []
                section.append({heading[2]: group})
        elif group is not None:
            links = re.findall(r"\[`?([^]`]+)`?\]\(([\w/-]+\.md)\)", line)
            if links and (line.startswith("|") or line.startswith("- ")):
                group.append({links[0][0]: links[0][1]})
    nav = [entry for entry in nav if [*entry.values()] != [[]]]
    return [*nav, {"API": [{TITLES.get(page, page): f"api/{page}.md"} for page in api()]}]
