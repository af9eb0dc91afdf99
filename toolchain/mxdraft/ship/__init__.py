"""From C sources and a bundle to devices."""
