"""Capabilities, a folder each, and the options of requests and engines that go with them."""
