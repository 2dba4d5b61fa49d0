"""A seat that computes while earlier updates and the next version are on their way: with a delay or an
overlap, and of a peer.
"""
