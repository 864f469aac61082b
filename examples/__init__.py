"""Examples; some packages install one of this name, so this one says that it is a package too."""
