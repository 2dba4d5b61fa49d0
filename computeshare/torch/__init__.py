"""For a training loop of your own: averages its module's weights in pairs with other processes that train it too.

    from computeshare.torch import connect

    with connect(model, group="mine") as conn:
        for inputs, labels in loader:
            conn.update_send(loss)  # before a batch: publishes the weights, begins to read another process's
            ...  # forward, backward, optimizer.step()
            conn.update_wait(loss)  # after it: averages the two

No job, ledger or reducer takes part: data, order and optimizer are the loop's own. See docs/guides/gossip.md.
"""

from computeshare.torch.connection import Connection, connect

__all__ = ["Connection", "connect"]
