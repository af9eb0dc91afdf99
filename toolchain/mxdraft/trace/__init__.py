"""mxdraft trace: a run recorded token by token (record.py), read back (read.py), and shown (page.py,
page.html, page.js). docs/trace.md has the format."""
