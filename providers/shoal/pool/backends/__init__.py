"""Backends, which start and end the nodes of pools. Each subpackage contains one implementation of the interface
`base.Backend`, and the options of its pools."""
