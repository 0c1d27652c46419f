export { Bases } from './bases.js';
export { Vent } from './requests.js';
export { listenUdp, listenUnix } from './server.js';
export { Peer, Station } from './station.js';
