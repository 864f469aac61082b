"""What `mkdocs build` does beside rendering docs/: pages from elsewhere, generated pages, and a check of every link."""

import logging
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import cards
import links
import notebooks
import outside
import reference

log = logging.getLogger("mkdocs.hooks.fedalloy")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    mounted = outside.pages()
    made = cards.pages() | reference.pages() | notebooks.pages()
    written = {Path(config.docs_dir) / file.src_uri: file.src_uri for file in files.documentation_pages()}
    tutorials = notebooks.places()
    sources = outside.sources([*written, *mounted, *tutorials])
    for uri, text in {**made, **{uri: source.text for uri, source in sources.items()}}.items():
        files.append(File.generated(config, uri, content=text))
    for path, uri in mounted.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for path, uri in outside.attachments().items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    outside.PLACES.update(
        {**written, **mounted, **tutorials, **{source.path: uri for uri, source in sources.items()}}
    )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that are right in the repository into links that are right on the site."""
    return outside.relinked(markdown, page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Warn about every link that leads nowhere and everything that a browser would fetch from elsewhere."""
    for fault in links.faults(Path(config.site_dir)):
        log.warning(fault)
