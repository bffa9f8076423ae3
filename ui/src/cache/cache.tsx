// The prefix tree: what is cached, its size, and its owners.
import { useMemo, useState } from "preact/hooks";
import { json, key } from "../api";
import { bytes, count, many, percent } from "../format";
import { Chart } from "../parts/chart";
import { Card, Empty, IconButton, Notice, Page } from "../parts/controls";
import { usePoll, useStore } from "../store";
import { Icicle } from "./icicle";
import { Outline } from "./outline";

export interface TreeNode {
  id: number;
  parent: number;
  namespace: string;
  start: number;
  tokens: number;
  pages: number;
  locks: number;
  hits: number;
  last_used: number;
  children: number;
  text: string;
  owner: string | null;
  places: string[];
}

export interface Tree {
  page_size: number;
  shown_nodes: number;
  num_nodes?: number;
  cached_tokens?: number;
  evictable_tokens?: number;
  namespaces?: number;
  bytes_per_token: number;
  nodes: TreeNode[];
}

interface Curve {
  prompts: number;
  cache_tokens: number;
  curve: { cache_tokens: number; hit_rate: number }[];
  tiers: { tier: string; tokens: number | null; hit_rate: number; hit_rate_if_doubled: number }[];
}

const MOST_NODES = 1000;

/** A node with its descendants, and the number of their tokens. */
export interface Branch {
  node: TreeNode;
  below: Branch[];
  total: number;
}

export function branches(nodes: TreeNode[]): Branch[] {
  const made = nodes.map((node): Branch => ({ node, below: [], total: node.tokens }));
  const roots: Branch[] = [];
  made.forEach((branch) => (branch.node.parent < 0 ? roots : made[branch.node.parent]!.below).push(branch));
  for (const branch of [...made].reverse()) if (branch.node.parent >= 0) made[branch.node.parent]!.total += branch.total;
  return roots;
}

export function ownerOf(node: TreeNode): string {
  if (node.owner) return node.owner;
  const [adapter, salt] = split(node.namespace);
  return salt ? "a salt of its own" : adapter ? `adapter ${adapter.slice(0, 24)}` : "everyone";
}

function split(namespace: string): [string, string] {
  const at = namespace.indexOf(":");
  return at < 0 ? [namespace, ""] : [namespace.slice(0, at), namespace.slice(at + 1)];
}

export function CacheView() {
  const has = useStore(key);
  const [live, setLive] = useState(false);
  const [chosen, setChosen] = useState<number>();
  const tree = usePoll(() => json<Tree>(`/cache/tree?max_nodes=${MOST_NODES}`), live ? 5000 : 0, [has]);
  const curve = usePoll(() => json<Curve>("/cache/curve?points=24"), live ? 20_000 : 0, [has]);
  const roots = useMemo(() => branches(tree.data?.nodes ?? []), [tree.data]);
  const tools = (
    <>
      <label class="check inline">
        <input type="checkbox" checked={live} onChange={(event) => setLive(event.currentTarget.checked)} /> <span>Follow</span>
      </label>
      <IconButton
        icon="retry"
        label="Ask again"
        onClick={() => {
          tree.again();
          curve.again();
        }}
      />
    </>
  );
  if (!tree.data) return <Page title="Prefix cache" tools={tools}>{tree.error ? <Notice error={tree.error} what="The prefix tree" /> : <p class="loading">Asking the server…</p>}</Page>;
  const { data } = tree;
  const size = (tokens: number) => (data.bytes_per_token ? bytes(tokens * data.bytes_per_token) : `${count(tokens)} tokens`);
  const node = data.nodes.find(({ id }) => id === chosen);
  return (
    <Page title="Prefix cache" tools={tools}>
      {tree.error && <Notice error={tree.error} what="The prefix tree" />}
      {!data.nodes.length ? (
        <Empty title="Nothing is cached yet">
          <p>Each prompt leaves its keys and values here. Say something in the <a href="#/chat">chat</a>, and ask again.</p>
        </Empty>
      ) : (
        <>
          <Owners nodes={data.nodes} pageSize={data.page_size} size={size} />
          <Card title="Tree" aside={<span class="hint">{data.num_nodes !== undefined ? `${count(data.shown_nodes)} of ${count(data.num_nodes)} nodes, ${size(data.cached_tokens!)}, of which ${size(data.evictable_tokens!)} may go` : `${count(data.shown_nodes)} nodes of yours`}</span>}>
            <p class="hint">Each box is a run of tokens that prompts share; what follows it stands below it. Its width is what it and all below it hold.</p>
            <Icicle roots={roots} chosen={chosen} onChoose={setChosen} />
          </Card>
          <div class="cards two-thirds">
            <Card title="Nodes">
              <Outline roots={roots} chosen={chosen} onChoose={setChosen} size={(tokens) => size(tokens)} />
            </Card>
            <Card title="Node">
              {node ? <Details node={node} pageSize={data.page_size} size={size} /> : <p class="hint">Choose a node to see what it holds.</p>}
            </Card>
          </div>
        </>
      )}
      {curve.data && curve.data.prompts > 0 && <CurveCard curve={curve.data} size={size} />}
    </Page>
  );
}

/** Pages on the device, by owner. */
function Owners({ nodes, pageSize, size }: { nodes: TreeNode[]; pageSize: number; size: (tokens: number) => string }) {
  const held = new Map<string, { tokens: number; nodes: number; locked: number }>();
  for (const node of nodes) {
    const name = ownerOf(node);
    const row = held.get(name) ?? { tokens: 0, nodes: 0, locked: 0 };
    const tokens = node.pages * pageSize;
    held.set(name, { tokens: row.tokens + tokens, nodes: row.nodes + 1, locked: row.locked + (node.locks ? tokens : 0) });
  }
  const rows = [...held].sort(([, a], [, b]) => b.tokens - a.tokens);
  const total = Math.max(1, rows.reduce((all, [, { tokens }]) => all + tokens, 0));
  return (
    <Card title="Who owns the bytes">
      <div class="meter tall" role="img" aria-label={rows.map(([name, { tokens }]) => `${name}: ${percent(tokens / total)}`).join(", ")}>
        {rows.map(([, { tokens }], i) => (
          <span class={`c${(i % 5) + 1}`} style={{ width: `${(100 * tokens) / total}%` }} />
        ))}
      </div>
      <div class="table-scroll" tabIndex={0} role="region" aria-label="Owners">
        <table class="plain-table">
          <thead>
            <tr>
              <th scope="col">Owner</th>
              <th scope="col" class="number">on the device</th>
              <th scope="col" class="number">share</th>
              <th scope="col" class="number">in use now</th>
              <th scope="col" class="number">nodes</th>
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, 12).map(([name, row], i) => (
              <tr>
                <th scope="row">
                  <i class={`swatch c${(i % 5) + 1}`} /> {name}
                </th>
                <td class="number">{size(row.tokens)}</td>
                <td class="number">{percent(row.tokens / total)}</td>
                <td class="number">{size(row.locked)}</td>
                <td class="number">{count(row.nodes)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Card>
  );
}

function Details({ node, pageSize, size }: { node: TreeNode; pageSize: number; size: (tokens: number) => string }) {
  const [adapter] = split(node.namespace);
  const facts: [string, string][] = [
    ["owner", ownerOf(node)],
    ["tokens", `${count(node.tokens)}, from position ${count(node.start)}`],
    ["memory", `${size(node.pages * pageSize)} in ${many(node.pages, "page")}`],
    ["lies on", node.places.join(", ") || "nothing: it is being written"],
    ["used by now", many(node.locks, "request")],
    ["hits", count(node.hits)],
    ["goes on in", many(node.children, "node")],
    ...(adapter ? ([["adapter", adapter]] as [string, string][]) : []),
  ];
  return (
    <div aria-live="polite">
      <pre class="node-text" tabIndex={0} aria-label="Its first tokens">
        {node.text}
      </pre>
      <dl class="facts narrow">
        {facts.map(([name, value]) => (
          <div>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

function CurveCard({ curve, size }: { curve: Curve; size: (tokens: number) => string }) {
  const points = [{ cache_tokens: 0, hit_rate: 0 }, ...curve.curve];
  return (
    <Card title="What a larger or smaller cache would do" aside={<span class="hint">from {count(curve.prompts)} recent prompts</span>}>
      <Chart label="Hit rate by size of the cache" times={points.map((point) => point.cache_tokens)} show={percent} max={1} axis={(tokens) => size(tokens)} series={[{ name: "hit rate", values: points.map((point) => point.hit_rate), color: 2 }]} />
      <p class="hint">
        {curve.tiers.map(({ tier, hit_rate, hit_rate_if_doubled, tokens }) => `Down to the ${tier}${tokens === null ? "" : ` (${size(tokens)})`}: ${percent(hit_rate)}, twice as much memory ${percent(hit_rate_if_doubled)}.`).join(" ")}
      </p>
    </Card>
  );
}
