"""Our models inside other libraries. Each file here imports the library that it is named after."""
