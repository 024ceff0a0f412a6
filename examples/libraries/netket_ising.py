"""netket: the ground state of a transverse-field Ising chain by variational Monte Carlo."""

import netket as nk
import numpy as np


def main():
    """Optimize a restricted Boltzmann machine, and compare with exact diagonalization."""
    graph = nk.graph.Chain(8)
    hilbert = nk.hilbert.Spin(0.5, graph.n_nodes)
    energy = nk.operator.IsingJax(hilbert, graph=graph, h=1.0)
    exact = nk.exact.lanczos_ed(energy.to_numba_operator() if hasattr(energy, "to_numba_operator")
                                else energy)[0]  # fmt: skip
    sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=16)
    state = nk.vqs.MCState(sampler, nk.models.RBM(alpha=1), n_samples=512, seed=1, sampler_seed=2)
    optimizer = nk.optimizer.Sgd(0.05)
    driver = nk.driver.VMC(
        energy, optimizer, variational_state=state, preconditioner=nk.optimizer.SR(diag_shift=0.02)
    )
    log = nk.logging.RuntimeLog()
    driver.run(80, out=log, show_progress=False)
    found = float(np.real(log.data["Energy"]["Mean"][-1]))
    print(f"energy is within 1 %: {abs(found - exact) < 0.01 * abs(exact)}")
    assert abs(found - exact) < 0.02 * abs(exact)


if __name__ == "__main__":
    main()
